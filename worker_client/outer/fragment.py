"""A part of the model: what the ranks have in common of it, and its mean on the way."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from worker_client.outer.averaging import AllRanks, ByQuorum, Common, Quorum
from worker_client.outer.quorum import Arrival, Outcome, Participant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.errors import ReductionError
    from worker_client.client.client import Client

log = logging.getLogger(__name__)


class _PendingStep(NamedTuple):
    """A fragment's mean on its way."""

    merges_at: int  # the step in which it is merged
    lr: float
    momentum: float
    averaging: AllRanks | ByQuorum | None = None  # None: the mean has come
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
        self._pending: _PendingStep | None = None

    @property
    def merges_at(self) -> float:
        """The step in which the mean that is on its way is merged; infinity if there is none."""
        return math.inf if self._pending is None else self._pending.merges_at

    @torch.no_grad()
    def begin(
        self, step: int, lr: float, momentum: float, merges_at: int, *, last: bool = False
    ) -> None:
        """Start averaging what the ranks have learned; `last` if it is for the last time."""
        self._drop()  # what an interrupt has left behind
        for gradient, outer, parameter in zip(
            self._views(self._gradient), self._views(self.outer), self._parameters, strict=True
        ):
            # From what the rank went on from: the outer parameter, rounded to its own type.
            gradient.copy_(outer.to(parameter.dtype)).sub_(parameter.to(gradient))
        averaging: AllRanks | ByQuorum
        if self.quorum is None:
            said = (self._number, step, self._made, lr, momentum)
            averaging = AllRanks(self._client, said, self._gradient, self._residual)
        else:
            arrival, rules = Arrival(self._made, self.tokens), self.quorum.rules
            participant = Participant(
                self._client.rank, rules, arrival, (lr, momentum), known=self._known, last=last
            )
            common = Common(self.outer, self._velocity)
            averaging = ByQuorum(self.quorum, participant, self._gradient, common, self._residual)
        self._pending = _PendingStep(merges_at, lr, momentum, averaging)

    def merge(self, step: int, alpha: float) -> ReductionError | None:
        """Make the outer step, and have the rank go on from there; or return why there is none."""
        pending, error = self._arrived()
        self._pending = None
        if pending is None:
            return error
        if not pending.empty:
            self._make_step(pending.lr, pending.momentum)
        self._made += 1
        self.restore(alpha)
        if not alpha:
            self.tokens = 0.0  # what was learned meanwhile is forgotten
        self.alike_at = -1 if alpha else step
        return None

    def _make_step(self, lr: float, momentum: float) -> None:
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
        pending, error = self._arrived()
        if error is not None:
            raise error
        return {
            "made": self._made,
            "tokens": self.tokens,
            "outer": self.outer.clone(),
            "velocity": self._velocity.clone(),
            "residual": None if self._residual is None else self._residual.clone(),
            "averaging": pending and [*pending[:3], self._gradient.clone()],
        }

    def load_state_dict(self, state: dict[str, Any], *, own: bool) -> None:
        """Go on from what `state_dict` has returned; `own` if that was at this rank."""
        self._drop()  # until it has ended this memory is written to
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
            self._pending = _PendingStep(merges_at, lr, momentum)

    def _arrived(self) -> tuple[_PendingStep | None, ReductionError | None]:
        """Wait for the mean; without one, what the rank has learned stays its own."""
        pending = self._pending
        if pending is None or pending.averaging is None:
            return pending, None
        averaged = pending.averaging.wait()
        self._pending = None
        self.tokens -= averaged.tokens
        if averaged.contribution is not None:
            self._shift(averaged.contribution)
        if averaged.common is not None:
            self._shift(averaged.common.outer - self.outer)
            self.outer.copy_(averaged.common.outer)
            self._velocity.copy_(averaged.common.velocity)
        if averaged.outcome is Outcome.AVERAGED:
            self._made, self._known = averaged.steps, averaged.steps + 1.0
            self._pending = pending._replace(averaging=None, empty=averaged.empty)
        elif averaged.outcome in {Outcome.COUNTED, Outcome.LEFT_OUT}:
            # How many there are by now is not known: it waits next time, however late it is.
            self._known = math.inf
        if averaged.outcome is Outcome.LEFT_OUT:
            self.left_out += 1
            log.warning(
                "the averaging of fragment %d has ended without this rank, which was late: what it "
                "has learned is part of its next one",
                self._number,
            )
        return self._pending, averaged.error

    @torch.no_grad()
    def _shift(self, by: torch.Tensor) -> None:
        """Have the rank go on from elsewhere, with what it has learned."""
        for parameter, view in zip(self._parameters, self._views(by), strict=True):
            parameter.copy_(parameter.to(view).add_(view))

    def _drop(self) -> None:
        """Forget the mean that is on its way, once it has ended."""
        if self._pending is not None and self._pending.averaging is not None:
            self._pending.averaging.drop()
        self._pending = None

    @torch.no_grad()
    def _read(self, flat: torch.Tensor) -> None:
        for parameter, view in zip(self._parameters, self._views(flat), strict=True):
            view.copy_(parameter)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a flat tensor in the shapes of the parameters."""
        parts = flat.split_with_sizes([one.numel() for one in self._parameters])
        return [part.view(one.shape) for part, one in zip(parts, self._parameters, strict=True)]
