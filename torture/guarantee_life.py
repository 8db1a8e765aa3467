"""A rank's part in one life of its job: makes the calls of a plan, and compares every result.

Every call must end with the right bits, or with a `ReductionError`, by its time; whatever else it
does is told at once, as a finding.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ml_dtypes
import numpy as np

from reducer.errors import ConfigError, RankLostError, ReductionError, ReductionTimeout
from torture import guarantee_backward as backward
from torture import guarantee_oracle as oracles
from torture import guarantee_outer as quorum
from torture.guarantee_judge import Judge
from torture.guarantee_plan import (
    ADMIT_EVERY,
    MAIN,
    NAMED,
    THREADS,
    Call,
    Plan,
    other_data,
    refused_data,
)
from torture.guarantee_signals import TICK_S, Clock, Interrupted, Interrupter
from worker_client.client.bootstrap import connect
from worker_client.client.client import Client
from worker_client.work import Work

MEET_S = 20.0  # for a process group to form, and then for its ranks to compare their models
LATE_S = 0.15  # that a late rank sleeps at most
REST_S = 0.05  # after a step with an error, for each in a row
MOST_REST_S = 0.5
KEPT = 20  # errors that are kept for a report


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's part in one life of a job: from when its ranks join until the last has left.

    Attributes:
        life: which one, over all of a job.
        rank, join, job, generation, servers, keys, settings: as of `worker_client.init`.
        data, exact, nodes, elastic: as of `Judge`.
        leader: ``host:port`` where a process group meets; "" for none.
        decider: port of the store where ranks decide that average by quorum, and make no calls; or
            None.
        timeout_s: of calls that have no timeout of their own.
        margin_s: how much later than its timeout a call may end.
        slack_s: how much later still in this topology, as its document says.
        most_errors: steps in a row with nothing but errors, after which the rank gives up.
        namespace: of the host's network that the rank has; "" for this machine's own.
    """

    life: int = 0
    rank: int = 0
    join: bool = False
    job: str = ""
    generation: int = 0
    servers: tuple[str, ...]
    keys: str | None = None
    plan: Plan
    data: str
    exact: bool
    nodes: tuple[int, ...] | None
    elastic: bool
    leader: str
    decider: int | None = None
    timeout_s: float
    margin_s: float
    slack_s: float
    most_errors: int
    namespace: str = ""
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


class Over(Exception):  # noqa: N818 (no error)
    """The rank takes part no longer."""


class Life:
    """A rank's part in one life of its job.

    Attributes:
        over: why it takes part no longer, once that is so.
        until: the step at which each thread ends, once that was told.
    """

    def __init__(
        self,
        part: Part,
        tell: Callable[[str, dict[str, Any]], None],
        clock: Clock,
        interrupter: Interrupter,
    ) -> None:
        self.part = part
        self.over = ""
        self.until: dict[int, int] = {}
        self.stop = threading.Event()
        self._tell = tell
        self._clock = clock
        self._interrupter = interrupter
        self._steps = dict.fromkeys(THREADS, 0)
        self._gate = threading.Barrier(len(THREADS), self._admit)
        self._at: dict[int, Call] = {}  # by thread, what it is about
        self._lock = threading.Lock()  # of what is counted
        self._counts: Counter[str] = Counter()
        self._masks: list[tuple[tuple[int, int, int], int]] = []
        self._errors: list[str] = []
        self._client: Client
        self._judge: Judge
        self._model: backward.Model

    # -- what is told -------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """Return what has come of calls since the last time."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            masks, self._masks = self._masks, []
            errors, self._errors = self._errors, []
        return {
            "life": self.part.life,
            "steps": dict(self._steps),
            "counts": dict(counts),
            "masks": masks,
            "errors": errors,
        }

    def find(self, kind: str, call: Call | None, detail: str) -> None:
        """Tell of something that must not be."""
        where = "" if call is None else f"{_named(call)} {call}: "
        self._tell("finding", {"life": self.part.life, "kind": kind, "detail": where + detail})

    def _count(self, *what: str) -> None:
        with self._lock:
            self._counts.update(what)

    def _note(self, call: Call, error: ReductionError) -> None:
        self._count("error", type(error).__name__)
        lost = isinstance(error, RankLostError) and error.rank == self._client.rank
        if lost and self.part.plan.admits:
            self.over = "the others go on without it"  # another is to join in its place
            self.stop.set()
        if call.name is None and not call.near:  # others are packed together
            self._count("untroubled error")
        with self._lock:
            if len(self._errors) < KEPT:
                self._errors.append(f"{_named(call)}: {type(error).__name__}: {error}")

    # -- a life -------------------------------------------------------------------------------

    def live(self) -> None:
        """Join, make calls until told to end, or until there is no going on, and leave."""
        part = self.part
        begun = time.monotonic()
        try:
            client = self._join()
        except ReductionError as error:
            self.over = f"not joined: {type(error).__name__}: {error}"
            return
        except RuntimeError as error:
            if not part.leader:
                raise
            self.over = f"no process group: {error}"
            return
        self._client = client
        self._judge = Judge(
            part.plan,
            client.rank,
            part.data,
            exact=part.exact,
            nodes=part.nodes,
            elastic=part.elastic,
        )
        said = {"life": part.life, "rank": client.rank, "seconds": time.monotonic() - begun}
        self._tell("joined", said)
        if part.decider is not None:
            try:
                self._train(quorum.Training(client, part.decider))
            except ReductionError as error:
                self.over = f"not begun: {type(error).__name__}: {error}"
            self._tell("leaving", {"life": part.life})
            client.shutdown()
            return
        threads = [
            threading.Thread(target=self._guarded, args=(thread,), name=f"named {thread}")
            for thread in NAMED
        ]
        for thread in threads:
            thread.start()
        self._guarded(MAIN)
        for thread in threads:
            thread.join()
        self._tell("leaving", {"life": part.life})
        client.shutdown()

    def _join(self) -> Client:
        part = self.part
        os.environ.update(part.environment)
        identity: dict[str, Any] = {"rank": part.rank, "world_size": part.plan.ranks}
        if part.join:
            identity = {"join": True}
        if part.leader:
            from torch import distributed  # noqa: PLC0415 (only some topologies need torch)

            distributed.init_process_group(
                "gloo",
                init_method=f"tcp://{part.leader}",
                timeout=timedelta(seconds=MEET_S),
                **identity,
            )
            identity = {}
        client = connect(
            servers=part.servers or None,
            job=part.job,
            generation=part.generation,
            keys=part.keys,
            timeout=part.timeout_s,
            wire_dtype=part.plan.wire_dtype or None,
            **identity,
            **part.settings,
        )
        if part.plan.ddp:
            try:
                self._model = backward.Model(client)
            except RuntimeError:  # of the process group, which a fault may have hit
                client.shutdown()
                raise
        return client

    def _guarded(self, thread: int) -> None:
        try:
            self._run(thread)
        except Over as over:
            self.over = self.over or str(over)
        except BaseException:  # noqa: BLE001 (told)
            self.find("untyped error", self._at.get(thread), traceback.format_exc())
            self.over = "a finding"
        finally:
            self._gate.abort()  # nobody is to wait for this thread
            if self.over:
                self.stop.set()

    def _run(self, thread: int) -> None:
        bad = number = 0
        while not self.stop.is_set() and number < self.until.get(thread, sys.maxsize):
            if self.part.plan.admits and number % ADMIT_EVERY == 0:
                try:
                    self._gate.wait()
                except threading.BrokenBarrierError:
                    return
                number = self._steps[thread]
            self._steps[thread] = number
            good = self._step(self.part.plan.step(thread, number), thread)
            bad = 0 if good else bad + 1
            if not self._client.usable:
                raise Over("the client has ended")
            if bad > self.part.most_errors:
                raise Over("nothing but errors")
            if bad:
                self.stop.wait(min(bad * REST_S, MOST_REST_S))
            number += 1

    def _train(self, training: quorum.Training) -> None:
        """Average by quorum until told to end, and tell what came of every outer step."""
        part = self.part
        most_s = 3 * (part.timeout_s + part.slack_s) + part.margin_s
        known: set[tuple[int, int]] = set()
        while not self.stop.is_set():
            begun = time.monotonic()
            try:
                training.step()
                for fragment, made, digest in training.common():
                    if (fragment, made) not in known:
                        known.add((fragment, made))
                        with self._lock:
                            self._masks.append(((MAIN, made, fragment), digest))
                        self._count("right", f"right of thread {MAIN}")
            except ReductionError as error:
                self._count("error", type(error).__name__)
                self.stop.wait(REST_S)
            if (took := time.monotonic() - begun) > most_s + self._clock.withheld(begun):
                self.find("hang", None, f"an averaging took {took:.1f} s")

    def _admit(self) -> None:
        """Let in who waits, while no thread has a call; then all threads are at the same step."""
        client, part = self._client, self.part
        step = max(self._steps.values())
        step += -step % ADMIT_EVERY
        begun, newcomer = time.monotonic(), client.newcomer
        try:
            if client.admit():
                self._judge.take_in(client.world_size, client.present)
                told = np.array([step])
                client.all_reduce(told, "max").wait()
                step = int(told[0])
                self._count("joined" if newcomer else "let in")
        except ReductionError as error:
            self._count("error", type(error).__name__, f"{type(error).__name__} of an admission")
            if newcomer:
                raise Over("it does not know where the others are") from None
        finally:
            most_s = 3 * (part.timeout_s + part.slack_s) + part.margin_s
            if (took := time.monotonic() - begun) > most_s + self._clock.withheld(begun):
                self.find("hang", None, f"an admission took {took:.2f} s")
        self._steps = dict.fromkeys(THREADS, step)

    def _step(self, calls: list[Call], thread: int) -> bool:
        """Make calls and wait for all; return whether any of them went as it should."""
        if calls[0].form == "gradient":
            return self._backward(calls)
        order = list(calls)
        if thread != MAIN:
            random.shuffle(order)
        running, good = [], False
        for call in order:
            self._at[thread] = call
            begun = time.monotonic()
            asked = self._ask(call)
            if isinstance(asked, tuple):
                running.append((call, begun, *asked))
            else:
                good |= asked
        random.shuffle(running)
        for one in running:
            self._at[thread] = one[0]
            good |= self._finish(*one)
        if any(self._trouble(call)[0] == "leave" for call in calls):
            raise Over("it leaves, as planned")
        return good

    def _backward(self, calls: list[Call]) -> bool:
        """Have DDP make calls in a backward pass; return whether it went as it should."""
        self._at[MAIN] = calls[0]
        begun = time.monotonic()
        before = self._client.present
        settled = self._model.settled
        try:
            gradients = self._model.backward([self._judge.contribution(call) for call in calls])
        except ReductionError as error:
            self._note(calls[0], error)
            return False
        except RuntimeError as error:
            if settled:
                raise
            raise Over(f"a fault has hit the process group: {error}") from None
        finally:
            part = self.part
            most_s = part.timeout_s + part.slack_s + part.margin_s + self._clock.withheld(begun)
            # Until then DDP waits for its process group, which a fault may have hit.
            if (took := time.monotonic() - begun) > most_s and settled:
                self.find("hang", calls[0], f"a backward pass took {took:.2f} s")
        present = min(before, self._client.present, key=len)
        found = [
            self._judge.judge(call, got, None, present)
            for call, got in zip(calls, gradients, strict=True)
        ]
        for call, wrong in zip(calls, found, strict=True):
            if wrong:
                self.find("wrong", call, wrong)
            else:
                self._count("right", f"right of thread {MAIN}", "right gradient")
        return not any(found)

    def _trouble(self, call: Call) -> tuple[str, float]:
        """Return what this rank is to do to a call: kind and amount; "" for nothing."""
        if call.trouble is None or call.trouble.rank != self.part.rank:
            return "", 0.0
        return call.trouble.kind, call.trouble.amount

    # -- a call -------------------------------------------------------------------------------

    def _ask(self, call: Call) -> tuple[Work, Any, Any] | bool:
        """Make a call; return its handle, array and residual, or whether none was to be."""
        kind, amount = self._trouble(call)
        if kind:
            self._count(f"trouble {kind}")
        if kind == "late":
            time.sleep(amount * LATE_S)
        refused = kind in {"refuse", "decline"}
        try:
            if kind == "decline" and call.name is None:
                self._client.decline(ValueError("it takes no part, as planned"))
                return True
            array, arguments = self._arguments(call)
            data = array
            if refused:
                data = refused_data(array, arguments, amount)
            elif kind == "disagree":
                data = array = other_data(array, arguments, amount)
            elif kind == "interrupt":
                self._interrupter.arm(kind, amount)
            work = self._client.all_reduce(_of_form(call, data), **arguments)
        except Interrupted:
            return True
        except ReductionError as error:
            if refused and isinstance(error, ConfigError):
                return True
            self._note(call, error)
            return False
        finally:
            if kind == "interrupt":
                self._interrupter.disarm()
        if refused:
            self.find("not refused", call, f"{type(data)} {arguments}")
        return work, array, arguments.get("residual")

    def _arguments(self, call: Call) -> tuple[Any, dict[str, Any]]:
        values = self._judge.contribution(call)
        if call.dtype == "bfloat16":
            values = values.view(ml_dtypes.bfloat16)
        if call.strided:
            wide = np.zeros((call.elements, 2), values.dtype)
            wide[:, 1] = values
            values = wide[:, 1]
        arguments: dict[str, Any] = {"op": call.op, "name": call.name, "timeout": call.timeout_s}
        if call.weights is not None:
            arguments["weight"] = call.weights[self.part.rank]
        if call.residual:
            arguments["residual"] = np.zeros(call.elements, np.float32)
        return values, arguments

    def _finish(self, call: Call, begun: float, work: Work, array: Any, residual: Any) -> bool:
        """Wait for the end of a call, and look at what came of it; return whether that is good."""
        part = self.part
        patience_s = (call.timeout_s or part.timeout_s) + part.slack_s + part.margin_s
        before = self._client.present
        kind, amount = self._trouble(call)
        if kind == "interrupt-wait":
            self._interrupter.arm(kind, amount)
            with suppress(Interrupted, ReductionError):
                work.wait(min(1.0, patience_s))
            self._interrupter.disarm()
        try:
            self._wait(call, work, begun, patience_s)
        except ReductionError as error:
            self._note(call, error)
            return False
        # Who was lost for the others may be back since: the fewest are those of the result.
        present = min(before, self._client.present, key=len)
        got = np.ascontiguousarray(array)
        got = got.view(np.uint16) if call.dtype == "bfloat16" else got
        if wrong := self._judge.judge(call, got, residual, present):
            self.find("wrong", call, wrong)
        else:
            self._count("right", f"right of thread {call.key[0]}")
            if part.elastic and oracles.tells(call) and kind != "disagree":
                whose = self._judge.whose(call, got)
                with self._lock:
                    self._masks.append((call.key, sum(1 << rank for rank in whose)))
        # As a program would at once; other ranks may have yet to finish.
        array[...] = 0
        return not wrong

    def _wait(self, call: Call, work: Work, begun: float, patience_s: float) -> None:
        """Wait until a call has ended, or raise `Over` as it hangs."""
        until = begun + patience_s
        while True:
            try:
                work.wait(max(0.0, until - time.monotonic()))
            except ReductionTimeout:
                if work.done():
                    work.wait()  # it has ended in this moment, perhaps well
                    return
            else:
                return
            withheld = self._clock.withheld(begun)
            if time.monotonic() >= begun + patience_s + withheld:
                seconds = time.monotonic() - begun
                said = f"no end after {seconds:.2f} s, of which {withheld:.2f} s were withheld"
                self.find("hang", call, said)
                faulthandler.dump_traceback(all_threads=True)
                raise Over("a call hangs")
            until = begun + patience_s + withheld + TICK_S


def _named(call: Call) -> str:
    return f"call {'.'.join(map(str, call.key))}"


def _of_form(call: Call, data: Any) -> Any:
    whole = isinstance(data, np.ndarray) and data.flags.writeable and data.dtype != np.complex64
    return backward.as_tensor(data) if call.form == "tensor" and whole else data
