"""Measures a training script's steps from within: how long they compute, when buckets are ready.

The probe stands before the communication hook of the script's DDP model. First the script trains as
it does, which shows what a step takes now. Then the hook returns at once: nothing is exchanged, no
rank waits for another, and the moments at which DDP hands over its buckets are those of the
backward pass alone. Weights differ by rank from there on: the script ends when that is measured.
"""

# No `from __future__ import annotations`: DDP inspects the hook's annotations as objects.
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # what torch.distributed.GradBucket is
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from reducer.errors import ConfigError
from reducer.planning.step_model import Bucket, Step
from worker_client.ddp import ReductionState
from worker_client.staging.wire_rule import ALONE_BYTES, SMALLEST_BYTES

WARM_UP = 3  # steps: DDP's first has other buckets than the rest, and whatever is lazy is made then

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Enough(BaseException):  # which no script's `except Exception` takes
    """Ends the script: everything is measured."""


class Measured(NamedTuple):
    """What was measured at a rank.

    Attributes:
        step: with nothing exchanged; samples are those of this rank.
        now_s: a step as the script makes it; None if it was not measured.
        attached: whether the script's gradients go through reducers.
    """

    step: Step
    now_s: float | None
    attached: bool = False


class _HostClock:
    """Moments of a model in host memory, whose work is done when a call returns."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, first: Any, last: Any) -> float:
        return float(last - first)


class _DeviceClock:
    """Moments at which a device has done what it was given up to then."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class _TimedStep:
    """The moments of one step; of several backward passes the one that exchanges is its last."""

    def __init__(self, begun: Any) -> None:
        self.begun = begun
        self.forwarded: Any = begun  # the end of its last forward pass
        self.ready: list[Any] = []
        self.sizes: list[tuple[int, int, int]] = []  # of each bucket, as of `Bucket`
        self.samples = 0
        self.complete = False


class Probe:
    """Measures a script's DDP model while the script runs.

    Args:
        steps: how many of each kind are measured.
        now: whether steps as the script makes them are measured as well.
        finish: called once with what was measured, within the script and at every rank in the same
            step; the script ends when it returns.
    """

    def __init__(self, steps: int, *, now: bool, finish: Callable[[Measured], object]) -> None:
        self._exchanging = WARM_UP + (steps if now else 0)  # so many steps, from the first on
        self._all = self._exchanging + steps
        self._finish = finish
        self._model: DistributedDataParallel | None = None
        self._hooked = self._attached = False
        self._stepped = 0  # optimizers' steps
        self._clock: _HostClock | _DeviceClock = _HostClock()
        self._steps: list[_TimedStep] = []

    @property
    def seen(self) -> str:
        """What the script did until it ended, as a sentence without its subject."""
        if self.stopped:
            return (
                f"made {self._all} optimizer steps without a model in DistributedDataParallel, and "
                "was stopped"
            )
        if self._model is None:
            return "has ended, and it has wrapped no model in DistributedDataParallel"
        made = max(0, len(self._steps) - 1)
        return f"has ended, and it has made {made} whole steps of the {self._all} needed"

    @property
    def stopped(self) -> bool:
        """Whether the script was ended because it trains without DDP."""
        return self._model is None and self._stepped > self._all

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the model that is wrapped meanwhile."""
        ddp: Any = DistributedDataParallel
        init, register = ddp.__init__, ddp.register_comm_hook

        @wraps(init)
        def watched_init(model: Any, *arguments: Any, **named: Any) -> None:
            init(model, *arguments, **named)
            self._watch(model)

        @wraps(register)
        def watched_register(model: Any, state: object, hook: Hook) -> None:
            register(model, state, self._around(hook))
            self._hooked = True
            self._attached = self._attached or isinstance(state, ReductionState)

        ddp.__init__, ddp.register_comm_hook = watched_init, watched_register
        steps = register_optimizer_step_pre_hook(self._step)
        try:
            yield
        finally:
            ddp.__init__, ddp.register_comm_hook = init, register
            steps.remove()

    def _step(self, *_: object) -> None:
        """Count an optimizer's step."""
        self._stepped += 1
        if self.stopped:
            raise Enough  # else a script without DDP would train to its end

    def _watch(self, model: DistributedDataParallel) -> None:
        if self._model is not None:
            raise ConfigError(
                "the script wraps two models in DistributedDataParallel, and --gain measures steps "
                "of one: record a timeline or a trace, and give it by --trace"
            )
        self._model = model
        self._attached = dist.get_backend(model.process_group) == "reduction"
        if any(one.device.type == "cuda" for one in model.parameters()):
            self._clock = _DeviceClock()
        disable: Any = torch.compiler.disable  # of what Dynamo would trace with the forward pass
        model.register_forward_pre_hook(disable(self._begin), with_kwargs=True)
        model.register_forward_hook(disable(self._forwarded))

    def _around(self, hook: Hook) -> Hook:
        def timed(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            self._ready(bucket)
            if len(self._steps) <= self._exchanging:
                return hook(state, bucket)
            return noop_hook(state, bucket)

        return timed

    def _begin(self, model: Any, arguments: Any, named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation between two steps
        if not self._hooked:  # by the script, up to its first step
            model.register_comm_hook(model.process_group, allreduce_hook)
        if not self._steps or self._steps[-1].complete:
            self._steps.append(_TimedStep(self._clock.mark()))
        if len(self._steps) > self._all:
            self._finish(self._measured())
            raise Enough
        if len(self._steps) > self._exchanging:
            model.broadcast_buffers = False  # ranks would wait for each other there
        self._steps[-1].samples += _samples([*arguments, *named.values()])

    def _forwarded(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._steps[-1].forwarded = self._clock.mark()

    def _ready(self, bucket: GradBucket) -> None:
        step = self._steps[-1]
        step.ready.append(self._clock.mark())
        gradients = bucket.gradients()
        large = [
            one.nbytes
            for one in gradients
            if one.dtype is torch.float32 and one.nbytes >= SMALLEST_BYTES
        ]
        # As `ReductionState.calls` makes them: what is exact shares one, and so does what is small.
        alone = sum(nbytes >= ALONE_BYTES for nbytes in large)
        calls = alone + (alone < len(large)) + (len(large) < len(gradients))
        step.sizes.append((bucket.buffer().nbytes, sum(large), calls))
        step.complete = step.complete or bucket.is_last()

    def _measured(self) -> Measured:
        compute_s = self._lengths(self._exchanging, self._all)
        now_s = self._lengths(WARM_UP, self._exchanging)
        last = self._steps[self._all - 1]
        alike = [one for one in self._steps[self._exchanging : -1] if one.sizes == last.sizes]
        seconds = self._clock.seconds
        ready_s = [
            median(seconds(one.begun, one.ready[at]) for one in alike)
            for at in range(len(last.sizes))
        ]
        buckets = tuple(Bucket(at, *sizes) for at, sizes in zip(ready_s, last.sizes, strict=True))
        backward_s = median(seconds(one.forwarded, one.ready[-1]) for one in alike)
        step = Step(median(compute_s), buckets, backward_s, last.samples or None)
        return Measured(step, median(now_s) if now_s else None, self._attached)

    def _lengths(self, first: int, last: int) -> list[float]:
        """Return the seconds of some steps, each up to the beginning of the next."""
        begun = [one.begun for one in self._steps[first : last + 1]]
        return [self._clock.seconds(*both) for both in pairwise(begun)]


def _samples(arguments: list[Any]) -> int:
    """Return how many samples a forward pass has: what its first tensor has of rows."""
    for one in arguments:
        if isinstance(one, torch.Tensor) and one.dim():
            return one.shape[0]
        if isinstance(one, dict | list | tuple) and (
            found := _samples([*(one.values() if isinstance(one, dict) else one)])
        ):
            return found
    return 0
