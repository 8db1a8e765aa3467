"""A part of the model: what the ranks have in common of it, and its mean on the way."""

from __future__ import annotations

import logging
import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from reducer.errors import MismatchError, ReductionError, ReductionTimeout
from worker_client.outer.averaging import Averaging, Common, Quorum
from worker_client.outer.quorum import Arrival, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_client.client.client import Client
    from worker_client.work import Work

# What a rank says with its pseudo-gradient: 1, which a rank that is lost does not say; the
# fragment, the step it is in, its outer steps so far, learning rate, momentum.
_SAID = struct.Struct("<?qqqdd")
_FIELDS = (
    ("fragment", "the fragment"),
    ("step", "the step that they are in"),
    ("steps", "the outer steps that they have made, as an averaging has failed at some of them"),
    ("lr", "the outer learning rate"),
    ("momentum", "the outer momentum"),
)

log = logging.getLogger(__name__)


class _Averaging(NamedTuple):
    """A fragment's mean on its way."""

    merges_at: int  # the step in which it is merged
    lr: float
    momentum: float
    works: tuple[Work, ...] = ()  # none: the mean has come, or it is by quorum
    said: np.ndarray[Any, np.dtype[np.uint8]] | None = None  # by all ranks: _SAID of each
    residual: torch.Tensor | None = None  # as it was before
    by_quorum: Averaging | None = None  # until its mean has come
    tokens: float = 0.0  # what it is of, by quorum
    empty: bool = False  # whether no rank had learned anything


class Fragment:
    """A part of the model: what the ranks have in common of it, and its mean on the way.

    Args:
        client: the job's.
        number: its place among the fragments, from 1.
        parameters: of this rank.

    Attributes:
        outer: the outer parameters, one after another.
        alike_at: the step in which the rank's own parameters became these; -1 if they are not.
        tokens: what the rank has learned from since its latest contribution that counts.
        left_out: how many averagings have ended without this rank.
        quorum: how averagings are decided; None if they need all ranks.
    """

    def __init__(
        self, client: Client, number: int, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self._client = client
        self._number = number
        self.alike_at = -1
        self.tokens = 0.0
        self.left_out = 0
        self.quorum: Quorum | None = None
        self._parameters = parameters
        self.outer = torch.empty(sum(one.numel() for one in parameters))
        self._read(self.outer)
        self._velocity = torch.zeros_like(self.outer)
        self._gradient = torch.zeros_like(self.outer)  # the pseudo-gradient, then the mean
        self._residual = None if client.wire_dtype == "none" else torch.zeros_like(self.outer)
        self._made = 0  # outer steps
        self._known = 0.0  # those that the rank knows of, by quorum
        self._averaging: _Averaging | None = None

    @property
    def merges_at(self) -> float:
        """The step in which the mean that is on its way is merged; infinity if there is none."""
        return math.inf if self._averaging is None else self._averaging.merges_at

    @torch.no_grad()
    def begin(
        self, step: int, lr: float, momentum: float, merges_at: int, *, last: bool = False
    ) -> None:
        """Start averaging what the ranks have learned; `last` if it is for the last time."""
        if self._averaging is not None:  # it was left behind by an interrupt
            self._wait()
            self._drop()
        for gradient, outer, parameter in zip(
            self._views(self._gradient), self._views(self.outer), self._parameters, strict=True
        ):
            # From what the rank went on from: the outer parameter, rounded to its own type.
            gradient.copy_(outer.to(parameter.dtype)).sub_(parameter.to(gradient))
        if self.quorum is not None:
            averaging = Averaging(
                self.quorum,
                self._number,
                Arrival(self._made, self.tokens),
                (lr, momentum),
                contribution=self._gradient.clone(),
                mean=self._gradient,
                common=Common(self.outer, self._velocity),
                known=self._known,
                residual=self._residual,
                last=last,
            )
            self._averaging = _Averaging(
                merges_at, lr, momentum, by_quorum=averaging, tokens=self.tokens
            )
            return
        said = np.zeros((self._client.world_size, _SAID.size), np.uint8)
        mine = _SAID.pack(True, self._number, step, self._made, lr, momentum)
        said[self._client.rank] = np.frombuffer(mine, np.uint8)
        before = None if self._residual is None else self._residual.clone()
        told = False
        try:
            alike = self._client.all_reduce(said, "sum")
            told = True
            mean = self._client.all_reduce(self._gradient, "mean", residual=self._residual)
        except BaseException as error:
            if not told:  # the other ranks make both calls
                self._client.decline(error)
            raise
        self._averaging = _Averaging(merges_at, lr, momentum, (alike, mean), said, before)

    def merge(self, step: int, alpha: float) -> ReductionError | None:
        """Make the outer step, and have the rank go on from there; or return why there is none."""
        averaging, error = self._arrived()
        self._averaging = None
        if averaging is None:
            return error
        if not averaging.empty:
            self._make_step(averaging.lr, averaging.momentum)
        self._made += 1
        self.restore(alpha)
        if not alpha:
            self.tokens = 0.0  # what was learned meanwhile is forgotten
        self.alike_at = -1 if alpha else step
        return None

    def _make_step(self, lr: float, momentum: float) -> None:
        """Move the outer parameters by the mean."""
        # Products and sums one by one: what torch does in one go is rounded once or twice, as the
        # processor has it, and the ranks' processors may differ.
        gradient, velocity = self._gradient, self._velocity
        velocity.mul_(momentum).add_(gradient)
        gradient.add_(velocity * momentum).mul_(lr)
        self.outer.sub_(gradient)

    @torch.no_grad()
    def restore(self, alpha: float) -> None:
        """Have the rank go on from the outer parameters, and so much of its own."""
        for parameter, outer in zip(self._parameters, self._views(self.outer), strict=True):
            if alpha:
                parameter.mul_(alpha).add_(outer.to(parameter), alpha=1 - alpha)
            else:
                parameter.copy_(outer)

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint's part, once the mean that is on its way has come."""
        averaging = None
        if self._averaging is not None:
            averaging, error = self._arrived()
            if error is not None:
                raise error
        return {
            "made": self._made,
            "tokens": self.tokens,
            "outer": self.outer.clone(),
            "velocity": self._velocity.clone(),
            "residual": None if self._residual is None else self._residual.clone(),
            "averaging": averaging and [*averaging[:3], self._gradient.clone()],
        }

    def load_state_dict(self, state: dict[str, Any], *, own: bool) -> None:
        """Go on from what `state_dict` has returned; `own` if that was at this rank."""
        if self._averaging is not None:
            self._wait()  # until then this memory is written to
        self._averaging = None
        self.alike_at = -1
        self._made = state["made"]
        self.tokens = state.get("tokens", 0.0)
        self._known = math.inf
        self.outer.copy_(state["outer"])
        self._velocity.copy_(state["velocity"])
        if self._residual is not None:
            saved = state["residual"] if own else None
            self._residual.zero_() if saved is None else self._residual.copy_(saved)
        if state["averaging"] is not None:
            merges_at, lr, momentum, mean = state["averaging"]
            self._gradient.copy_(mean)
            self._averaging = _Averaging(merges_at, lr, momentum)

    def _arrived(self) -> tuple[_Averaging | None, ReductionError | None]:
        """Wait for the mean; without one, what the rank has learned stays its own."""
        assert self._averaging is not None
        averaging = self._averaging
        if averaging.by_quorum is not None:
            return self._arrived_by_quorum(averaging, averaging.by_quorum)
        failed = self._wait()
        if not failed and averaging.said is not None:
            failed = _differences(averaging.said)
        if failed:
            self._drop()
            return None, failed[0]
        self._averaging = averaging._replace(works=(), said=None, residual=None)
        return self._averaging, None

    def _arrived_by_quorum(
        self, averaging: _Averaging, made: Averaging
    ) -> tuple[_Averaging | None, ReductionError | None]:
        """Wait for the decision, and for the mean if this rank's contribution is in it."""
        error = made.wait()
        self._averaging = None
        if made.outcome in {Outcome.AVERAGED, Outcome.COUNTED}:
            self.tokens -= averaging.tokens
        if made.outcome is Outcome.AVERAGED:
            if made.common is not None:
                self._shift(made.common.outer - self.outer)
                self.outer.copy_(made.common.outer)
                self._velocity.copy_(made.common.velocity)
            self._made = made.steps
            self._known = made.steps + 1.0
            self._averaging = averaging._replace(by_quorum=None, empty=made.empty)
        elif made.outcome is Outcome.COUNTED:
            self._shift(made.contribution)
            self._known = math.inf  # how many there are by now is not known
        elif made.outcome is Outcome.LEFT_OUT:
            self.left_out += 1
            self._known = math.inf  # it waits next time, however late it is
            log.warning(
                "the averaging of fragment %d has ended without this rank, which was late: what it "
                "has learned is part of its next one",
                self._number,
            )
            if made.last:
                error = ReductionTimeout(
                    "the other ranks have made their last averaging without this one, which was "
                    "late: what it has learned since its previous one is not in their parameters"
                )
        return self._averaging, error

    @torch.no_grad()
    def _shift(self, by: torch.Tensor) -> None:
        """Have the rank go on from elsewhere, with what it has learned."""
        for parameter, view in zip(self._parameters, self._views(by), strict=True):
            parameter.copy_(parameter.to(view).add_(view))

    def _wait(self) -> list[ReductionError]:
        """Wait for the all-reduces in progress, and return their errors."""
        if self._averaging is not None and self._averaging.by_quorum is not None:
            self._averaging.by_quorum.wait()
        works = () if self._averaging is None else self._averaging.works
        return [error for work in works if (error := _failure(work))]

    def _drop(self) -> None:
        """Forget the mean that is on its way: what was sent for it counts as not sent."""
        averaging, self._averaging = self._averaging, None
        if self._residual is not None and averaging is not None and averaging.residual is not None:
            self._residual.copy_(averaging.residual)

    @torch.no_grad()
    def _read(self, flat: torch.Tensor) -> None:
        for parameter, view in zip(self._parameters, self._views(flat), strict=True):
            view.copy_(parameter)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a flat tensor in the shapes of the parameters."""
        parts = flat.split_with_sizes([one.numel() for one in self._parameters])
        return [part.view(one.shape) for part, one in zip(parts, self._parameters, strict=True)]


def _failure(work: Work) -> ReductionError | None:
    """Wait for an all-reduce, and return its error."""
    try:
        work.wait()
    except ReductionError as error:
        return error
    return None


def _differences(said: np.ndarray[Any, np.dtype[np.uint8]]) -> list[ReductionError]:
    """Return what the ranks' outer steps differ in."""
    here = [(rank, _SAID.unpack(row)) for rank, row in enumerate(said)]
    here = [(rank, values) for rank, values in here if values[0]]  # but for ranks that are lost
    (first, expected), *others = here
    return [
        MismatchError.between(
            "outer step",
            field,
            (first, expected[at]),
            (rank, values[at]),
            called=f"{words} (load the state of one checkpoint at all ranks)",
        )
        for rank, values in others
        for at, (field, words) in enumerate(_FIELDS, 1)
        if values[at] != expected[at]
    ]
