"""Where a rank that joins meets the job: all-reduces between it and the lowest rank of the others.

A job of two at the same reducers, in which the lowest rank is rank 0 and the newcomer is rank 1.
One joins at a time; others are refused as duplicates meanwhile, and try again. Each of the two
fills its half of a buffer with JSON:

| all-reduce | rank 0 | rank 1 |
|---|---|---|
| 1 | | that it is there |
| 2 | the membership to join: how many ranks have ever been in the job, it included; who is lost | |
| 3 | | that reducers have admitted it to that membership |
| 4 | whether the ranks have let it in | |
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.errors import LocalProtocolError, ReductionError, RemoteProtocolError
from reducer.wire.constants import DType, ReduceOp
from worker_client.protocol.operation import Operation
from worker_client.runtime.service_thread import STOP_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.communicators.communicator import FlatCommunicator
    from worker_client.protocol.spec import JobSpec

    Enter = Callable[[JobSpec], FlatCommunicator]

NAME = "/join"  # behind the job's
LOOK_S = 0.1
RETRY_S = 0.5  # until the reducers have forgotten who was here before
GRACE_S = 10.0  # several times what ranks take to go on without a lost one
_HALF = 1 << 16

log = logging.getLogger(__name__)


class Proposal(NamedTuple):
    """A membership to join."""

    world_size: int  # ranks that have ever taken part, with the one that joins, which is the last
    lost: list[int]  # those that do not any more
    run: str  # what tells this run of the job from another
    generation: int

    @classmethod
    def parse(cls, said: dict[str, Any]) -> Proposal:
        """Return what the lowest rank has offered."""
        kinds = {"world_size": int, "lost": list, "run": str, "generation": int}
        if said.keys() != kinds.keys() or not all(
            type(said[name]) is kind for name, kind in kinds.items()
        ):
            raise RemoteProtocolError(f"no offer of a membership: {said!r}"[:200])
        proposal = cls(**said)
        known = range(proposal.world_size - 1)
        if not all(type(rank) is int and rank in known for rank in proposal.lost):
            raise RemoteProtocolError(f"no offer of a membership: {said!r}"[:200])
        return proposal


def rendezvous_spec(spec: JobSpec, rank: int) -> JobSpec:
    """Return what the rendezvous of a job is for one of the two: rank 0 lets in, rank 1 joins."""
    return replace(
        spec,
        job=f"{spec.job}{NAME}",
        rank=rank,
        world_size=2,
        elastic=False,
        fallback=False,
        generation=0,  # of all of the job's: a restarted rank may count one of its own
        run="",
        hosts={},
        inproc={},
        weights=(),
    )


class _Handshake:
    """One visit to the rendezvous.

    `check` raises a ReductionError when this rank is to leave.
    """

    def __init__(self, enter: Enter, spec: JobSpec, check: Callable[[], object]) -> None:
        self._check = check
        self._rank = spec.rank
        self._communicator = enter(spec)

    def join(self, timeout_s: float) -> None:
        self._communicator.join(timeout_s)

    def exchange(self, said: dict[str, Any], *, timeout_s: float = math.inf) -> dict[str, Any]:
        """Say something to the other one; return what that one says.

        Raises:
            RemoteProtocolError: what that one says is nothing that belongs here.
            ReductionError: the other one has left, or this one is to leave.
        """
        data = bytearray(2 * _HALF)
        text = json.dumps(said).encode()
        if len(text) > _HALF:
            raise LocalProtocolError(f"{len(text)} bytes are too much to tell a rank that joins")
        data[self._rank * _HALF : self._rank * _HALF + len(text)] = text
        ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        operation = Operation(
            memoryview(data), DType.UINT8, ReduceOp.SUM, None, timeout_s, ended=ends.put
        )
        operation.unwatched = True
        self._communicator.submit(operation)
        while True:
            with suppress(queue.Empty):
                error = ends.get(timeout=LOOK_S)
                break
            self.check()
        if error is not None:
            raise error
        theirs = (1 - self._rank) * _HALF
        answer = data[theirs : theirs + _HALF].rstrip(b"\0")
        try:
            found = json.loads(answer)
        except ValueError as why:
            raise RemoteProtocolError(f"not in JSON: {bytes(answer[:100])!r}") from why
        if not isinstance(found, dict):
            raise RemoteProtocolError(f"no JSON object: {bytes(answer[:100])!r}")
        return found

    def check(self) -> None:
        """Raise a ReductionError if the other one has left, or this one is to leave."""
        self._check()
        if self._communicator.lost_ranks:
            raise LocalProtocolError("the other one has left")

    def close(self) -> None:
        self._communicator.stop()


class NewcomerRendezvous:
    """The lowest rank's side: offers the next membership to each newcomer.

    `proposal` returns the membership that one more rank would join, or raises a ReductionError if
    this rank can let nobody in any more.
    """

    def __init__(self, enter: Enter, spec: JobSpec, proposal: Callable[[], Proposal]) -> None:
        self._enter = enter
        self._spec = rendezvous_spec(spec, 0)
        self._propose = proposal
        self._lock = threading.Lock()
        self._ready: Proposal | None = None  # what the one accepted who is here
        self._verdict: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        """Whether a rank is ready to join the membership that comes next.

        One that is ready for another membership is told to begin anew.
        """
        with self._lock:
            if self._ready is not None and self._ready != self._propose():
                self._answer(admitted=False)
            return self._ready is not None

    def decide(self, *, admitted: bool) -> None:
        """Tell the rank that was ready whether it is in."""
        with self._lock:
            self._answer(admitted=admitted)

    def stop(self) -> None:
        """Let nobody in any more."""
        self._stopped.set()
        self._thread.join(STOP_S)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise LocalProtocolError("this client was shut down")
        self._propose()

    def _answer(self, *, admitted: bool) -> None:
        self._ready = None
        self._verdict.put(admitted)

    def _run(self) -> None:
        while not self._stopped.is_set():
            if not self._receive_one():
                self._stopped.wait(RETRY_S)

    def _receive_one(self) -> bool:
        """Wait until a rank comes, and tell it what becomes of it; false: that has failed."""
        handshake: _Handshake | None = None
        try:
            self._check()
            handshake = _Handshake(self._enter, self._spec, self._check)
            handshake.join(STOP_S)
            handshake.exchange({})
            proposal = self._propose()
            handshake.exchange(proposal._asdict())
            handshake.exchange({})
            self._verdict = queue.SimpleQueue()
            with self._lock:
                self._ready = proposal
            while True:
                with suppress(queue.Empty):
                    admitted = self._verdict.get(timeout=LOOK_S)
                    break
                handshake.check()
            handshake.exchange({"admitted": admitted}, timeout_s=STOP_S)
        except ReductionError as error:
            log.debug("nobody has joined: %s", error)
            return False
        except Exception:
            log.exception("a rank could not join")
            return False
        finally:
            with self._lock:
                self._ready = None
            if handshake is not None:
                handshake.close()
        return True


class MembershipRequest:
    """The side of a rank that joins, which knows of `spec` what its settings say.

    The reducers have `timeout_s` to answer; it gives up at `until`, of the monotonic clock.

    Raises:
        ReductionError: nobody lets this rank in now.
    """

    def __init__(self, enter: Enter, spec: JobSpec, timeout_s: float, until: float) -> None:
        self._stopped = threading.Event()
        self._handshake = _Handshake(enter, rendezvous_spec(spec, 1), self._check)
        self.refused = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._handshake.join(timeout_s)
            self._handshake.exchange({}, timeout_s=max(LOOK_S, until - time.monotonic()))
            self.proposal = Proposal.parse(self._handshake.exchange({}))
        except BaseException:
            self._handshake.close()
            raise

    def accept(self) -> None:
        """Say that this rank is in the membership and waits for the others."""
        self._handshake.exchange({})
        self._thread = threading.Thread(target=self._await_verdict, name="rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the rendezvous."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        self._handshake.close()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise LocalProtocolError("this client was shut down")

    def _await_verdict(self) -> None:
        try:
            verdict = self._handshake.exchange({})
        except ReductionError as error:
            log.debug("the rendezvous has ended: %s", error)
            # The others may have let this rank in all the same, and go on without the lowest one.
            if self._stopped.wait(GRACE_S):
                return
            verdict = {"admitted": False}
        if verdict.get("admitted") is not True:
            self.refused.set()
