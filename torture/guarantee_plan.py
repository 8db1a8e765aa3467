"""What the ranks of `torture.guarantee` ask for, call by call: the same at every rank, by a seed.

A rank has a main thread, whose calls mostly have no names, and two more, whose calls all have some.
A thread goes step by step: it makes some calls, and then waits for all of them.
"""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAIN, *NAMED = THREADS = (0, 1, 2)
ALIKE = (1, 2)  # places of a named thread's steps whose calls look the same in every step
OPS = ("sum", "mean", "min", "max", "product")
DTYPES = ("float32",) * 6 + ("float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8")
TROUBLES = ("refuse", "decline", "disagree", "interrupt", "interrupt-wait", "late", "leave")
TENSORS = 0.15  # of calls
BACKWARD_EVERY = 6  # steps of the main thread
ADMIT_EVERY = 12  # steps of each thread
GRADIENTS = (3, 300, 5000, 70_000)  # elements; some fill a bucket of DDP's with others
NAMED_TROUBLES = ("refuse", "disagree", "late")  # of threads that no signal interrupts


class Trouble(NamedTuple):
    """Something that one rank does to one call.

    Attributes:
        kind: ``refuse``: it asks for what is refused; ``decline``: it takes no part; ``disagree``:
            it asks for something else; ``interrupt``, ``interrupt-wait``: a signal handler raises
            in its call, or in its wait; ``late``: it sleeps before; ``leave``: it shuts its client
            down afterwards.
        rank: who does.
        amount: from 0 to 1, of whatever can be more or less.
    """

    kind: str
    rank: int
    amount: float

    @property
    def forbids(self) -> bool:
        """Whether the call can have no result with this rank among those who give one."""
        return self.kind in {"refuse", "decline", "disagree"}


class Call(NamedTuple):
    """One call, the same at every rank.

    Attributes:
        key: thread, step, and place in it.
        name: of the call, or None.
        dtype, op: of the reduction.
        elements: of the array.
        strided: whether the array is not contiguous.
        weights: of each rank, or None.
        residual: whether it is given one.
        timeout_s: of this call, or None for the client's.
        trouble: what one of the ranks does to it, or None.
        near: whether something is done to this step, which may cost the calls in flight with it.
        form: what holds the values: ``array``, ``tensor`` of torch, or ``gradient`` of a model
            whose backward pass makes the call, by DDP's hook.
    """

    key: tuple[int, int, int]
    name: str | None
    dtype: str
    op: str
    elements: int
    strided: bool = False
    weights: tuple[float, ...] | None = None
    residual: bool = False
    timeout_s: float | None = None
    trouble: Trouble | None = None
    near: bool = False
    form: str = "array"


@dataclass(frozen=True)
class Plan:
    """All calls of one life of a job.

    Attributes:
        seed: of everything.
        ranks: number of ranks.
        extras: whether calls may have weights, and residuals if there is a `wire_dtype`.
        wire_dtype: what large float32 tensors travel as; "" for themselves.
        troubles: how often a step has one, from 0 to 1.
        uniform: whether all calls without names look alike.
        shortest_s: what a call's own timeout is at least, where it has one.
        ddp: whether there are backward passes.
        admits: whether ranks let others in between steps: all threads then make as many.
    """

    seed: str
    ranks: int
    extras: bool
    wire_dtype: str
    troubles: float
    uniform: bool = False
    shortest_s: float = 0.005
    ddp: bool = False
    admits: bool = False

    def step(self, thread: int, number: int) -> list[Call]:
        """Return the calls of a thread's step, in the order of those that have no names."""
        rng = random.Random(f"{self.seed} {thread} {number}")  # noqa: S311 (dice, not secrets)
        named = thread != MAIN
        if self.ddp and not named and number % BACKWARD_EVERY == 1:
            return [
                Call((thread, number, place), None, "float32", "mean", count, form="gradient")
                for place, count in enumerate(GRADIENTS)
            ]
        places = range(rng.choice((1, 1, 2, 3, 4, 8)) if not named else 4)
        troubled = rng.randrange(len(places)) if rng.random() < self.troubles else -1
        calls = []
        for place in places:
            name = None
            if named:
                # The n-th calls of a name belong together, so each step has all of them; and some
                # names never recur.
                name = f"{thread}.{place}" if place else f"{thread}.{place} of step {number}"
            elif rng.random() < 0.1:
                name = f"main.{place}"
            trouble = self._trouble(rng, named) if place == troubled else None
            near = troubled >= 0
            calls.append(self._call(rng, (thread, number, place), name, trouble, near=near))
        return calls

    def _call(
        self,
        rng: random.Random,
        key: tuple[int, int, int],
        name: str | None,
        trouble: Trouble | None,
        *,
        near: bool,
    ) -> Call:
        # Calls that look alike are those that could be mistaken for each other.
        alike = self.uniform if name is None else key[2] in ALIKE
        dice = random.Random(f"{self.seed} {name}") if alike else rng  # noqa: S311
        dtype, op, count = dice.choice(DTYPES), dice.choice(OPS), _count(dice)
        count = min(count, 1000) if alike else count
        if op == "mean" and "int" in dtype:
            op = "sum"
        weights, residual = None, False
        if self.extras and name is None and not alike and rng.random() < 0.08:
            dtype = rng.choice(("float32", "float64"))
            op = "mean"
            weights = tuple(float(rng.randrange(4)) for _ in range(self.ranks - 1))
            weights = (*weights, float(rng.randrange(1, 4)))
        elif self.extras and self.wire_dtype and name is None and not alike and rng.random() < 0.1:
            dtype, residual, count = "float32", True, max(count, 5000)
        short = trouble is not None and trouble.kind == "late" and rng.random() < 0.6
        return Call(
            key=key,
            name=name,
            dtype=dtype,
            op=op,
            elements=count,
            strided=rng.random() < 0.05 and not residual,
            weights=weights,
            residual=residual,
            timeout_s=rng.uniform(self.shortest_s, 10 * self.shortest_s) if short else None,
            trouble=trouble,
            near=near,
            form="tensor" if rng.random() < TENSORS else "array",
        )

    def _trouble(self, rng: random.Random, named: bool) -> Trouble:
        kinds = NAMED_TROUBLES if named else TROUBLES
        weights = [0.03 if kind == "leave" else 1.0 for kind in kinds]
        kind = rng.choices(kinds, weights)[0]
        return Trouble(kind, rng.randrange(self.ranks), rng.random())


def _count(rng: random.Random) -> int:
    """Return a number of elements: mostly few, as more results than bytes are to be compared."""
    (most,) = rng.choices((1, 300, 6000, 60_000, 500_000), (2, 80, 14, 3.6, 0.4))
    return rng.randrange(most + 1)


def refused_data(array: Any, arguments: dict[str, Any], amount: float) -> Any:
    """Return data that is refused, or make an argument one that is."""
    which = int(amount * 6)
    if which == 0:
        return array.astype(np.complex64)
    if which == 1:
        return "no array"
    if which == 2:
        array.flags.writeable = False
        return array
    wrong: tuple[str, Any] = (("op", "median"), ("timeout", "soon"), ("weight", -1.0))[which - 3]
    arguments[wrong[0]] = wrong[1]
    return array


def other_data(array: Any, arguments: dict[str, Any], amount: float) -> Any:
    """Return other data than the other ranks have, or make another reduction of it."""
    if amount < 0.5 or array.size == 0:
        arguments.pop("residual", None)
        return np.ones(array.size + 1 + int(amount * 2000), array.dtype)
    arguments["op"] = "min" if arguments["op"] != "min" else "max"
    arguments.pop("weight", None)
    return array
