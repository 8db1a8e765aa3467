"""Models for `bench.ddp`: the true parameters of large networks, and a small one really trained.

A large network's parameters have the shapes, number and order that the network has in PyTorch;
they are listed here from its architecture. Its compute is simulated: every layer takes the share
of the time that it has of the network's multiplications, and that time is slept. A sleeping layer
burns no CPU and holds no GIL, as one that runs on a GPU does not, so that a machine with few cores
is not what is measured. Its gradients are real: layer by layer, from last to first, autograd gets
``s * w`` (the gradient of ``s / 2 * |w|^2``), where s is another number at every rank and step.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import nn

Shape = tuple[int, ...]

BACKWARD_SHARE = 2 / 3  # of the compute: it multiplies twice, for the weights and for the inputs
SIMULATED_BATCH = 32  # samples per rank and step, a name for the step's work
DIGITS_BATCH = 16


@dataclass(frozen=True)
class Layer:
    """Parameters whose gradients are ready together; `cost` is in multiplications per sample."""

    shapes: tuple[Shape, ...]
    cost: float


def resnet50() -> list[Layer]:
    """Return ResNet-50 for 1000 classes and 224 x 224 images: 161 tensors, 25,557,032 numbers."""

    def convolution(inputs: int, outputs: int, kernel: int, size: int) -> Layer:
        shape = (outputs, inputs, kernel, kernel)
        return Layer((shape, (outputs,), (outputs,)), prod(shape) * size * size)  # with its norm

    layers = [convolution(3, 64, 7, 112)]
    inputs, size = 64, 56
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(convolution(inputs, width, 1, size))
            size //= stride if block == 0 else 1  # the 3 x 3 convolution strides
            layers.append(convolution(width, width, 3, size))
            layers.append(convolution(width, 4 * width, 1, size))
            if block == 0:
                layers.append(convolution(inputs, 4 * width, 1, size))  # the shortcut
            inputs = 4 * width
    return [*layers, Layer(((1000, inputs), (1000,)), 1000 * inputs)]


def gpt(width: int, blocks: int, tokens: int, vocabulary: int) -> list[Layer]:
    """Return a GPT.

    The token embedding is also the last layer's matrix, so that its gradient is ready last of all
    though most of it is computed first.
    """

    def linear(inputs: int, outputs: int) -> Layer:
        return Layer(((inputs, outputs), (outputs,)), tokens * inputs * outputs)

    norm = Layer(((width,), (width,)), 0)
    attend = 2 * tokens * tokens * width  # queries times keys, and weights times values
    qkv = linear(width, 3 * width)
    block = [
        norm,
        Layer(qkv.shapes, qkv.cost + attend),
        linear(width, width),
        norm,
        linear(width, 4 * width),
        linear(4 * width, width),
    ]
    embeddings = [Layer(((vocabulary, width),), 0), Layer(((tokens, width),), 0)]
    return [*embeddings, *(blocks * block), Layer(norm.shapes, tokens * width * vocabulary)]


def gpt2() -> list[Layer]:
    """Return GPT-2 small with 1024 tokens of context: 148 tensors, 124,439,808 numbers."""
    return gpt(768, 12, 1024, 50257)


def small_gpt() -> list[Layer]:
    """Return a GPT two thirds of which are its embedding: 76 tensors, 12,996,096 numbers."""
    return gpt(256, 6, 256, 32000)


def small_cnn() -> list[Layer]:
    """Return five convolutions and two linear layers: 14 tensors, 2,446,602 numbers."""
    sizes = ((3, 32, 32), (32, 64, 32), (64, 128, 16), (128, 256, 8), (256, 256, 4))
    layers = [
        Layer(((outputs, inputs, 3, 3), (outputs,)), 9 * inputs * outputs * size * size)
        for inputs, outputs, size in sizes
    ]
    linear = [Layer(((outputs, inputs), (outputs,)), inputs * outputs) for inputs, outputs in _ENDS]
    return [*layers, *linear]


_ENDS = ((4096, 350), (350, 10))  # of the small CNN: inputs and outputs


def many_small() -> list[Layer]:
    """Return 400 linear layers of 96 to 96: 800 tensors, 3,724,800 numbers."""
    return [Layer(((96, 96), (96,)), 96 * 96)] * 400


def mlp() -> list[Layer]:
    """Return five linear layers of 1024 to 1024: 10 tensors, 5,248,000 numbers."""
    return [Layer(((1024, 1024), (1024,)), 1024 * 1024)] * 5


class Pace:
    """Makes a layer take its time: each is done when its share of the pass has gone by.

    What the CPU does meanwhile (gradients, copies into buckets) is part of that time, as it is
    beside a GPU.
    """

    def __init__(self, forward_s: float, backward_s: float) -> None:
        self._forward_s = forward_s
        self._backward_s = backward_s
        self._start = 0.0
        self._length = 0.0

    def forward(self) -> None:
        """Start the forward pass now."""
        self._start, self._length = time.perf_counter(), self._forward_s

    def backward(self) -> None:
        """Start the backward pass now."""
        self._start, self._length = time.perf_counter(), self._backward_s

    def reach(self, share: float) -> None:
        """Sleep until this share of the pass has gone by."""
        left = self._start + share * self._length - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Step(torch.autograd.Function):
    """One layer's turn in the forward and in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        pace: Pace,
        shares: tuple[float, float],  # of the forward pass, before this layer and after it
        signal: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        before, after = shares
        ctx.pace, ctx.done = pace, 1 - before
        ctx.save_for_backward(*weights)
        pace.reach(after)
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (signal,) = outputs
        gradients = [weights * signal for weights in ctx.saved_tensors]
        ctx.pace.reach(ctx.done)
        return None, None, signal, *gradients


class Simulated(nn.Module):
    """A network of layers that sleep; `forward(s)` returns a loss with gradients ``s * w``."""

    def __init__(self, layers: list[Layer], compute_s: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # the same weights at every rank
        self._layers = [
            [nn.Parameter(torch.rand(shape, generator=generator).sub_(0.5)) for shape in one.shapes]
            for one in layers
        ]
        for number, layer in enumerate(self._layers):
            for place, weights in enumerate(layer):
                self.register_parameter(f"layer{number}_{place}", weights)
        total = sum(layer.cost for layer in layers)
        done = [cost / total for cost in accumulate(layer.cost for layer in layers)]
        self._shares = list(pairwise([0.0, *done]))
        self._pace = Pace((1 - BACKWARD_SHARE) * compute_s, BACKWARD_SHARE * compute_s)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        """Take the forward pass's time; `signal` is one number, s."""
        self._pace.forward()
        value = torch.ones(())
        for shares, layer in zip(self._shares, self._layers, strict=True):
            value = _Step.apply(self._pace, shares, value, *layer)  # type: ignore[no-untyped-call]
        self._pace.backward()  # starts as soon as this returns
        loss: torch.Tensor = value * signal
        return loss


class Digits(nn.Module):
    """Two convolutions and two linear layers for 8 x 8 grey images of ten digits.

    All of it is smooth: where a ReLU turns, the different order in which Gloo adds would grow from
    a last bit to a visible difference.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights at every rank
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 16, 128),
            nn.GELU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return ten scores per image; `images` has shape (n, 1, 8, 8)."""
        scores: torch.Tensor = self.layers(images)
        return scores


@dataclass(frozen=True)
class Workload:
    """What one rank trains.

    Attributes:
        build: makes the network, with the same weights every time.
        loss: of (network, rank, step); the same at every call, and different at every rank.
        batch: samples per rank and step.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    batch: int


ARCHITECTURES = {
    "resnet50": resnet50,
    "gpt2": gpt2,
    "mlp": mlp,
    "small-cnn": small_cnn,
    "small-gpt": small_gpt,
    "many-small": many_small,
}
MODELS = (*ARCHITECTURES, "digits")


def workload(name: str, compute_s: float) -> Workload:
    """Return the workload called `name`; `compute_s` is its forward and backward time, if slept."""
    if name == "digits":
        return Workload(Digits, _DigitsData().loss, DIGITS_BATCH)
    layers = ARCHITECTURES[name]()
    return Workload(lambda: Simulated(layers, compute_s), _simulated_loss, SIMULATED_BATCH)


def shapes(name: str) -> Iterator[Shape]:
    """Yield the shapes of a model's parameters, all float32."""
    if name == "digits":
        yield from (tuple(weights.shape) for weights in Digits().parameters())
        return
    for layer in ARCHITECTURES[name]():
        yield from layer.shapes


def nbytes(name: str) -> int:
    return 4 * sum(prod(shape) for shape in shapes(name))


def _simulated_loss(network: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    signal = torch.rand((), generator=generator) + 0.5
    loss: torch.Tensor = network(signal)
    return loss


class _DigitsData:
    """Scikit-learn's 1797 handwritten digits, loaded when the first batch is asked for."""

    @cached_property
    def _data(self) -> tuple[torch.Tensor, torch.Tensor]:
        from sklearn.datasets import load_digits  # noqa: PLC0415 (slow to load)

        images, labels = load_digits(return_X_y=True)
        scaled = torch.tensor(images / 16.0, dtype=torch.float32)
        return scaled.reshape(-1, 1, 8, 8), torch.tensor(labels)

    def loss(self, network: nn.Module, rank: int, step: int) -> torch.Tensor:
        """Return the cross entropy of a batch of this rank's own."""
        images, labels = self._data
        generator = torch.Generator().manual_seed(1000 * step + rank)
        chosen = torch.randint(len(images), (DIGITS_BATCH,), generator=generator)
        return nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
