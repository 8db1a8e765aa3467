"""Train a small GPT to continue Python's own source text, letter by letter.

    REDUCTION_WIRE_DTYPE=int8 torchrun --nproc-per-node 2 examples/gpt_text.py --steps 2000

What the gradients travel as is a setting; with ``--stock`` Gloo averages them. ``--no-feedback``
drops what rounding takes away. The loss is that of text that it has not seen, in nats a letter;
rank 0 says it after every `--report` steps, too.
"""

import argparse
import hashlib
import math
import string
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import worker_client
from worker_client.ddp import state_of

LETTERS = string.printable
CONTEXT, WIDTH, HEADS, LAYERS = 48, 64, 4, 2
BATCH = 8  # pieces of text at each rank
TEXT_BYTES, HELD_BACK = 2_000_000, 200_000
PEAK_RATE, WARM_UP = 3e-3, 100


class Block(nn.Module):
    """Attention to what comes before, then a layer of its own for each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what becomes of a batch of texts, each letter a vector."""
        batch, length, _ = x.shape
        made = self.queries_keys_values(self.before_attention(x))
        q, k, v = made.view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Predicts the next letter at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return a score for each letter that may come next, at each place of a batch."""
        x = self.letters(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Text:
    """The beginning of the standard library, and the pieces of it that a rank trains on.

    Args:
        seed: of the choice of pieces; None: torch's random numbers choose.
    """

    def __init__(self, seed: int | None = None) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
        number = {letter: at for at, letter in enumerate(LETTERS)}
        letters = [number[letter] for letter in text[:TEXT_BYTES] if letter in number]
        self._seen = torch.tensor(letters[:-HELD_BACK])
        self._held_back = torch.tensor(letters[-HELD_BACK:])
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the mean loss of the next batch."""
        most = len(self._seen) - CONTEXT
        starts = torch.randint(most, (BATCH,), generator=self._generator)
        return _loss_at(model, self._seen, starts)

    @torch.no_grad()
    def held_back_loss(self, model: nn.Module) -> float:
        """Return the mean loss of text that is in no batch."""
        starts = torch.arange(0, HELD_BACK - CONTEXT, CONTEXT)
        parts = [_loss_at(model, self._held_back, part) * len(part) for part in starts.split(100)]
        return float(sum(parts) / len(starts))


def _loss_at(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    pieces = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: it rises for a while, and falls along a cosine to 0."""
    share = math.cos(math.pi / 2 * step / steps) ** 2
    return PEAK_RATE * min((step + 1) / WARM_UP, 1) * share


def reported(step: int, every: int) -> bool:
    """Return whether the loss after this step, counted from 0, is said."""
    return every > 0 and (step + 1) % every == 0


def digest(model: nn.Module) -> str:
    """Return a fingerprint of all weights."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train, and say what has come of it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--stock", action="store_true", help="train over Gloo")
    arguments.add_argument("--no-feedback", action="store_true", help="keep no residuals")
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--report", type=int, default=0, help="steps; 0: only in the end")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = Text(seed=1000 * options.seed + rank)
    torch.manual_seed(options.seed)
    network = GPT()
    model = DistributedDataParallel(network)
    client = None if options.stock else worker_client.attach(model)
    if client is not None and options.no_feedback:
        state_of(model).error_feedback = False
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    begun = time.perf_counter()
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, options.steps)
        optimizer.zero_grad()
        text.loss(model).backward()
        optimizer.step()
        if rank == 0 and reported(step, options.report):
            print(f"step {step + 1}: loss {text.held_back_loss(network):.5f}", flush=True)
    seconds = time.perf_counter() - begun

    reduced = 0 if client is None else client.bytes_reduced
    print(
        f"rank {rank}: loss {text.held_back_loss(network):.8g}, weights {digest(network)}, "
        f"{reduced} bytes reduced, {seconds:.1f} s",
        flush=True,
    )
    dist.barrier()  # a rank that hosts a reducer leaves when all have their last result
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
