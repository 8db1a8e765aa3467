"""DiLoCo: ranks train by themselves, and reducers average what they have learned now and then.

    outer = OuterOptimizer(model, every=50)
    for inputs, targets in batches:
        loss(model(inputs), targets).backward()
        optimizer.step()                            # this rank's own, over no network
        optimizer.zero_grad()
        outer.step()
    outer.finish()

The ranks have parameters in common, the outer ones, from which each trains on. After `every` steps
a rank's pseudo-gradient is what has to be taken from the outer parameters to get its own; with the
mean of these, momentum `m` and learning rate `lr`, the outer parameters make a step of SGD with
Nesterov's momentum, from which the ranks go on (Douillard and others, arXiv 2311.08105)::

    v = m v + mean
    outer = outer - lr (mean + m v)

With fragments, parts of the model take turns within `every` steps; with a delay, a mean travels
while the ranks train on, and is merged so many steps later::

    own = alpha own + (1 - alpha) outer

That is Streaming DiLoCo (arXiv 2501.18512). In a job with ``REDUCTION_WIRE_DTYPE=int8``
pseudo-gradients travel in 8 bits, and what that takes away from one is added to the rank's next.

With `min_ranks` an averaging may end without ranks that are late. What these have learned is part
of their next one, and every rank counts by the tokens that its pseudo-gradient is of.
"""

from __future__ import annotations

import json
import math
import secrets
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError, MismatchError
from worker_client import config
from worker_client._packing import Pack
from worker_client.client.bootstrap import DEFAULT
from worker_client.collectives import all_gather_bytes, broadcast
from worker_client.outer.averaging import Quorum
from worker_client.outer.fragment import Fragment
from worker_client.outer.quorum import UNKNOWN, Rules
from worker_client.staging.weighted import check_weight

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from reducer.errors import ReductionError
    from worker_client.client.client import Client

# With a delay, how much of what a rank has learned meanwhile is kept: as in arXiv 2501.18512.
ALPHA = 0.5


class OuterOptimizer:
    """Makes outer steps with the mean of what the ranks have learned.

    Every rank makes one when its model is complete, which gives it rank 0's parameters, and then
    loads what it has saved of all three: the model, its own optimizer, and this. It calls `step`
    after each step of its own optimizer. Parameters may be of any floating type and on any device.
    What the ranks have in common is kept in host memory as float32: three times the model's size,
    and twice more where pseudo-gradients are rounded. With `min_ranks` it is once more during an
    averaging, and up to seven times more where that brings a rank up to date. Each rank's own
    remain parameters that require no gradient when this is made, and buffers, such as running
    means.

    Args:
        model: whose parameters that require a gradient are averaged, the same at every rank.
        client: the one to use; `worker_client.init()`'s by default.
        every: number of a rank's own steps between two outer steps of a parameter.
        lr: of the outer steps; 1 with `momentum` 0 is plain averaging (local SGD).
        momentum: of the outer steps.
        fragments: number of parts of the model, of about the same size, that are averaged one after
            another at steps apart.
        delay: number of steps between the start of a part's averaging and its merging.
        alpha: part of a rank's own parameters in what it goes on from, 0 to 1; by default 0 without
            a delay, and 0.5 with one. With 0 a delay's own steps are forgotten.
        min_ranks: how many ranks an averaging needs; all of them by default. With fewer it may end
            without ranks that are late, each of which is told and adds what it has learned to its
            next one.
        grace: seconds, or text such as ``"30s"``, for which that many ranks wait for the others,
            and for a member's contribution: more than an averaging takes. With `min_ranks` alone.
        store: a store of torch.distributed that outlives each rank, such as a `TCPStore` in a
            process of its own, where the ranks decide. With `min_ranks` alone.

    Attributes:
        lr, momentum: as given, and may be changed between two steps, at all ranks alike.

    Raises:
        ConfigError: an argument is wrong; the message says what to write.
        MismatchError: ranks disagree on the arguments, or on their parameters' sizes.
        ReductionError: as `Client.all_reduce`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        client: Client | None = None,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        min_ranks: int | None = None,
        grace: float | str | None = None,
        store: Store | None = None,
    ) -> None:
        parameters = [one for one in model.parameters() if one.requires_grad]
        _check(parameters, every, fragments, delay, alpha)
        self._client = DEFAULT.get() if client is None else client
        self._quorum = _quorum(self._client, min_ranks, grace, store)
        self._every = every
        self._delay = delay
        self._alpha = alpha if alpha is not None else ALPHA if delay else 0.0
        self._steps = 0
        self.lr = lr
        self.momentum = momentum
        self._fragments = [
            Fragment(self._client, at, part)
            for at, part in enumerate(_parts(parameters, fragments), 1)
        ]
        self._joining = self._client.newcomer  # it gets the others' state: `load_state_dict`
        self._loaded = 0  # states
        self._name = ""
        if not self._joining:
            grace_s = 0.0 if self._quorum is None else self._quorum.rules.grace_s
            self._begin_alike({"min_ranks": min_ranks, "grace": grace_s})
        self._share_quorum()

    @property
    def left_out(self) -> int:
        """How many averagings of fragments have ended without this rank, as it was late."""
        return sum(fragment.left_out for fragment in self._fragments)

    @property
    def averaging(self) -> bool:
        """Whether a mean is on its way, or waits for its step; the same at every rank.

        Meanwhile no ranks can join: `worker_client.elastic.sync` is for the steps between, which
        there are if `fragments` times `delay` is less than `every`.
        """
        return any(fragment.merges_at < math.inf for fragment in self._fragments)

    def step(self, *, tokens: float = 1.0) -> None:
        """Count a step of this rank's own optimizer, and average what is due.

        Args:
            tokens: that the step has learned from, or samples: how much it counts in a mean. All
                ranks count alike without `min_ranks`.

        Raises:
            ConfigError: `tokens` is negative or no number.
            MismatchError: an earlier averaging has failed at some ranks alone, or `lr` or
                `momentum` differ: a checkpoint's state makes the ranks alike again.
            ReductionError: as `Client.all_reduce`. What the ranks have learned is not lost: if the
                averaging has failed at all of them, the next one makes up for it.
        """
        check_weight(tokens)
        self._steps += 1
        count = len(self._fragments)
        for fragment in self._fragments:
            fragment.tokens += float(tokens)
        failed = self._merge(self._steps, self._alpha)
        # Also after an error: the other ranks may have had none, and begin.
        for at, fragment in enumerate(self._fragments, 1):
            if self._steps % self._every == at * self._every // count % self._every:
                fragment.begin(self._steps, self.lr, self.momentum, self._steps + self._delay)
        if not self._delay:
            failed += self._merge(self._steps, self._alpha)
        if failed:
            raise failed[0]

    def finish(self) -> None:
        """Average what the ranks have learned since the last time.

        They end with the same parameters, but for those that require no gradient. It is an outer
        step, and none of what was just averaged. With `min_ranks` all ranks are waited for, up to
        the client's timeout; then so many suffice.

        Raises:
            MismatchError, ReductionError: as `step`.
            ReductionTimeout: the others have ended without this rank.
        """
        failed = self._merge(self._steps + self._delay, self._alpha)
        for fragment in self._fragments:
            if fragment.alike_at != self._steps or self._quorum is not None:
                fragment.begin(self._steps, self.lr, self.momentum, self._steps, last=True)
        failed += self._merge(self._steps, 0.0)
        if failed:
            raise failed[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the model and the rank's own optimizer.

        It waits for what is being averaged. All of it is the same at every rank, save what rounding
        has taken away from the rank's own pseudo-gradients, which other ranks do not load. With
        `min_ranks` a rank that was late may have an earlier state, with which it goes on; then each
        rank has to load its own.

        Raises:
            MismatchError, ReductionError: as `step`.
        """
        return {
            "steps": self._steps,
            "every": self._every,
            "delay": self._delay,
            "rank": self._client.rank,
            "lr": self.lr,
            "momentum": self.momentum,
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned, with a model of the same parameters.

        Raises:
            ConfigError: the state is that of another model, or of other fragments; or this rank
                has joined others, and has other arguments than they.
        """
        sizes = [fragment.outer.numel() for fragment in self._fragments]
        others = [saved["outer"].numel() for saved in state["fragments"]]
        if sizes != others:
            raise ConfigError(
                f"the state is of {len(others)} fragments of {others} values, and this model has "
                f"{len(sizes)} of {sizes}: give OuterOptimizer the model and fragments= of then"
            )
        for name, mine in (("every", self._every), ("delay", self._delay)):
            if self._joining and state[name] != mine:
                raise ConfigError(
                    f"OuterOptimizer: the ranks that this one joins have {name}={state[name]}, and "
                    f"this one {name}={mine}: give it the same"
                )
        self._joining = False
        self._loaded += 1
        self._share_quorum()
        self._steps = state["steps"]
        self.lr, self.momentum = state["lr"], state["momentum"]
        own = state["rank"] == self._client.rank
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved, own=own)

    def _merge(self, until: int, alpha: float) -> list[ReductionError]:
        """Merge what is to be merged in this step or before; return the errors."""
        due = [one for one in self._fragments if one.merges_at <= until]
        found = [one.merge(self._steps, alpha) for one in due]
        return [error for error in found if error is not None]

    def _share_quorum(self) -> None:
        """Let the ranks decide anew, as they begin or have loaded the state of a checkpoint."""
        if self._quorum is not None:
            name, steps = f"{self._name}.{self._loaded}", UNKNOWN if self._loaded else 0
            for at, fragment in enumerate(self._fragments, 1):
                fragment.quorum = self._quorum._replace(name=f"{name}/{at}", steps=steps)

    def _begin_alike(self, more: dict[str, Any]) -> None:
        """Have every rank begin with rank 0's parameters, if all were given the same arguments."""
        sizes = [fragment.outer.numel() for fragment in self._fragments]
        arguments = {
            "every": self._every,
            "delay": self._delay,
            "lr": self.lr,
            "momentum": self.momentum,
            "fragments": f"fragments of {sizes} values",
            **more,
        }
        said = {**arguments, "name": f"outer-{secrets.token_hex(4)}"}
        gathered = all_gather_bytes(self._client, json.dumps(said).encode())
        (first, expected), *others = ((rank, json.loads(one)) for rank, one in gathered.items())
        self._name = expected["name"]
        for rank, got in others:
            for name in arguments:
                if got[name] != expected[name]:
                    raise MismatchError.between(
                        "OuterOptimizer", name, (first, expected[name]), (rank, got[name])
                    )
        pack = Pack([fragment.outer for fragment in self._fragments])
        broadcast(self._client, pack.buffer, root=first)  # rank 0 may be lost
        pack.unpack()
        for fragment in self._fragments:
            fragment.restore(0.0)


def _check(
    parameters: list[torch.nn.Parameter],
    every: int,
    fragments: int,
    delay: int,
    alpha: float | None,
) -> None:
    if not parameters:
        raise ConfigError("the model has no parameter that requires a gradient")
    if any(not one.is_floating_point() or hasattr(one, "to_local") for one in parameters):
        raise ConfigError(
            "outer steps are for parameters of floating types that each rank has as a whole: "
            "neither complex ones nor DTensors, as fully_shard makes them"
        )
    if every < 1:
        raise ConfigError(f"every={every}: give the number of steps between two outer ones")
    if not 1 <= fragments <= min(every, len(parameters)):
        raise ConfigError(
            f"fragments={fragments}: give 1 to {min(every, len(parameters))}, one parameter for "
            "each at least, and a step of `every`"
        )
    if not 0 <= delay <= every:
        raise ConfigError(f"delay={delay}: give 0 to {every}, the steps until the next averaging")
    if alpha is not None and not 0 <= alpha < 1:
        raise ConfigError(f"alpha={alpha}: give 0 to less than 1")


def _quorum(
    client: Client, min_ranks: int | None, grace: float | str | None, store: Store | None
) -> Quorum | None:
    """Return how the ranks decide, or refuse arguments by which they could not."""
    if min_ranks is None:
        if grace is not None or store is not None:
            raise ConfigError("grace= and store= go with min_ranks=: give that, or none of them")
        return None
    if not 1 <= min_ranks <= client.world_size:
        raise ConfigError(f"min_ranks={min_ranks}: give 1 to {client.world_size}, the ranks")
    if grace is None or store is None:
        raise ConfigError(
            "min_ranks= needs grace=, for how long so many ranks wait for the others, and store=, "
            "where they decide: a torch.distributed.TCPStore in a process that is none of theirs"
        )
    client.check_subgroups()
    grace_s = config.wait_s("grace", grace)
    if not 0 < grace_s < math.inf:
        raise ConfigError(f"grace={grace}: give more than 0 s, and more than an averaging takes")
    return Quorum(client, store, Rules(client.world_size, min_ranks, grace_s, client.timeout_s))


def _parts(parameters: list[torch.nn.Parameter], count: int) -> list[list[torch.nn.Parameter]]:
    """Cut a list of parameters into parts of about the same size, none of them empty."""
    sizes = list(accumulate(one.numel() for one in parameters))
    parts = []
    begin = 0
    for at in range(1, count + 1):
        end = begin + 1
        last = len(parameters) - (count - at)  # leaves one for each of the others
        while end < last and sizes[end - 1] < sizes[-1] * at / count:
            end += 1
        parts.append(parameters[begin:end])
        begin = end
    return parts
