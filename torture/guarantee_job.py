"""The parent's side of `torture.guarantee_rank`: the ranks of a job, life after life."""

import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torture import guarantee_rank
from torture.guarantee_life import Part
from torture.guarantee_outer import decider
from torture.guarantee_plan import ADMIT_EVERY, MAIN, THREADS
from worker_client.commands.demo.ranks import free_port

log = logging.getLogger(__name__)
START_S = 60.0  # for the process that ranks are forked from to import everything
LAST_LINES = 200
COSTLY_TROUBLES = ("leave", "interrupt", "interrupt-wait")  # after which a client may have ended
SAMPLES = 20  # errors of a class that are kept
MOST_JOIN = 3  # in a life: a result is looked for among all sets of ranks
PRELOAD = ["torture.guarantee_rank", "torch", "torch.distributed"]  # what is missing is left out


@dataclass
class Tally:
    """The results, errors and faults of all calls of a topology.

    Attributes:
        counts: of calls, by what became of them, and of errors by their classes.
        findings: what must not be.
        samples: some errors of each class.
        lives: how often a job began.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, list[str]] = field(default_factory=dict)
    lives: int = 0
    slowest_join_s: float = 0.0

    @property
    def wrong(self) -> int:
        """Findings of results that are wrong."""
        return sum(one["kind"] == "wrong" for one in self.findings)

    @property
    def compared(self) -> int:
        """Results that were compared, over all ranks."""
        return int(self.counts["right"]) + self.wrong

    def has(self, results: int, faults: int) -> bool:
        """Whether as many results were compared, and as many faults came."""
        return self.compared >= results and sum(self.faults.values()) >= faults


class Member:
    """One rank's process, and what was heard of its present life.

    Attributes:
        state: ``joining``, ``running``, ``leaving``, ``over`` or ``dead``.
        why: why it is over.
        right: how many results each thread has.
        failed: errors.
        steps: which step each thread is at.
        stopped: whether it was sent SIGSTOP.
    """

    def __init__(self, rank: int, words: Path, namespace: str) -> None:
        self.rank = rank
        self.words = words
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=guarantee_rank.main, args=(theirs, str(words), namespace), daemon=True
        )
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0
        self.stopped = False
        self.killed = False
        self.state = "over"
        self.renew(-1)

    def renew(self, life: int) -> None:
        """Forget what was heard of earlier lives."""
        self.life = life
        self.why = ""
        self.right: dict[int, int] = {}
        self.failed = 0
        self.steps = dict.fromkeys(THREADS, 0)
        self.errors: list[str] = []
        self.heard = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self.state != "dead"

    @property
    def takes_part(self) -> bool:
        """Whether it is in its life, or about to be."""
        return self.state in {"joining", "running", "leaving"}

    def begin(self, part: Part) -> None:
        """Have it take part in a life."""
        self.renew(part.life)
        self.right = dict.fromkeys(THREADS if part.decider is None else (MAIN,), 0)
        self.state = "joining"
        self.send("begin", part)

    def send(self, what: str, said: Any) -> None:
        """Tell it something."""
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is heard
            self.connection.send((what, said))

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if not self.alive:
            return
        self.killed |= number in {signal.SIGKILL, signal.SIGABRT}
        self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def bury(self) -> int:
        """Take note that it has ended; return its exit code, negative for a signal."""
        self.state = "dead"
        self._process.join()
        code = self._process.exitcode
        self.connection.close()
        return 0 if code is None else code

    def end(self) -> None:
        """Kill it, if it is there."""
        if self.alive:
            self.signal(signal.SIGKILL)
            self.bury()

    def last_words(self) -> str:
        """Return the end of what it wrote to standard error; "" if it did not live to write."""
        said = self.words.read_text(errors="replace") if self.words.exists() else ""
        return "\n".join(said.strip().splitlines()[-LAST_LINES:])


class Job:
    """The ranks of one job.

    Attributes:
        part: of rank 0 in its first life; of others differs what is their own, and `per_rank`.
        settled: whether all ranks have had good results in this life.
        struck: how many faults have come in it, without connections that broke and go on.
        calm: whether none of them, and nothing else, may cost a call.
    """

    def __init__(
        self,
        part: Part,
        tally: Tally,
        per_rank: Callable[[int], dict[str, Any]],
        folder: Path,
    ) -> None:
        self.part = part
        self.life = -1
        self.generation = -1
        self.settled, self.struck, self.calm = False, 0, True
        self.fresh = bool(part.leader)  # a process group is not made twice in a process
        self._tally = tally
        self._per_rank = per_rank
        self._folder = folder
        self._made = 0
        self._masks: dict[tuple[int, int, int], dict[int, int]] = {}
        self._unexplained: list[tuple[Member, list[str]]] = []
        self.members = [self._make(rank) for rank in range(part.plan.ranks)]

    # -- lives --------------------------------------------------------------------------------

    def begin(self, *, same_generation: bool = False) -> None:
        """Begin the next life, with the processes that are left and new ones for the others."""
        self.life += 1
        self.generation += not same_generation
        self._tally.lives += 1
        self._masks = {}
        self._unexplained = []
        self.settled, self.struck, self.calm = False, 0, True
        if self.part.leader:
            self.part = replace(self.part, leader=f"127.0.0.1:{free_port()}")
        if self.part.decider is not None:
            self._store = decider()
            self.part = replace(self.part, decider=self._store.port)
        for member in self.members[self.part.plan.ranks :]:
            member.end()
        del self.members[self.part.plan.ranks :]
        for rank, member in enumerate(self.members):
            if self.fresh or not member.alive:
                member.end()
                self.members[rank] = self._make(rank)
        for member in self.members:
            member.begin(self._part_of(member.rank))

    def intrude(self, rank: int) -> Member:
        """Start another process for a rank whose own is gone, with other values; return it."""
        intruder = self._make(rank)
        part = self._part_of(rank)
        intruder.begin(replace(part, data=f"{part.data} intruder", most_errors=2))
        return intruder

    def join(self) -> bool:
        """Start one more rank, which the others are to let in; return whether that could be."""
        number = len(self.members)
        if not self.settled or number >= self.part.plan.ranks + MOST_JOIN:
            return False
        self.members.append(self._make(number))
        self.members[-1].begin(replace(self._part_of(number), join=True))
        return True

    def _part_of(self, rank: int) -> Part:
        part, seed = self.part, f"{self.part.plan.seed} {self.part.job} {self.life}"
        part = replace(
            part,
            life=self.life,
            rank=rank,
            generation=self.generation,
            plan=replace(part.plan, seed=seed),
            data=f"{part.data} {self.life}",
        )
        return replace(part, **self._per_rank(rank))

    def _make(self, rank: int) -> Member:
        self._made += 1
        words = self._folder / f"{self.part.job.replace('/', '-')}-{self._made}"
        return Member(rank, words, self._per_rank(rank)["namespace"])

    @property
    def running(self) -> list[Member]:
        """Members that take part."""
        return [member for member in self.members if member.takes_part]

    @property
    def joined(self) -> bool:
        """Whether all that are there have joined."""
        return all(member.state != "joining" for member in self.members)

    def stop(self, members: Iterable[Member] | None = None) -> None:
        """Tell ranks to leave at once, wherever they are."""
        for member in self.running if members is None else members:
            member.send("stop", {"life": self.life})

    def finish(self, ahead: int) -> None:
        """Tell all ranks to leave after the same step of each thread."""
        until = {
            thread: max(member.steps[thread] for member in self.members) + ahead
            for thread in THREADS
        }
        until[MAIN] += 4 * ahead  # it is faster, and what ranks tell is older for it
        if self.part.plan.admits:
            most = max(until.values())
            until = dict.fromkeys(THREADS, most + -most % ADMIT_EVERY)
        for member in self.running:
            member.send("stop at", {"life": self.life, "until": until})

    def end(self) -> None:
        """Kill all processes."""
        for member in self.members:
            member.end()

    # -- what is heard ------------------------------------------------------------------------

    def hear(self, member: Member) -> None:
        """Take note of what a member says, or of its end."""
        try:
            what, said = member.connection.recv()
        except (EOFError, OSError):
            self._bury(member)
            return
        member.heard = time.monotonic()
        if what == "finding":
            self.find(member, said["kind"], said["detail"])
        elif said["life"] != member.life:
            return
        elif what == "progress":
            self._take(member, said)
        elif what == "joined":
            member.state, member.rank = "running", said["rank"]
            self._tally.slowest_join_s = max(self._tally.slowest_join_s, said["seconds"])
        elif what == "leaving":
            member.state = "leaving"
            self.calm = False  # others may not be told of that step yet, or have passed it
        else:
            member.state, member.why = "over", said["why"]
            errors = "not joined" if self.calm else "not joined: MismatchError"
            if member.rank >= self.part.plan.ranks and member.why.startswith(errors):
                self.find(member, "needless error", member.why)

    def judge(self) -> None:
        """Find out which errors nothing explains that any rank has said by now."""
        if not self._unexplained:
            return
        for member in self.members:
            while member.alive and member.connection.poll():
                self.hear(member)
        for member, errors in self._unexplained:
            if self.calm:
                self.find(member, "needless error", "; ".join(errors))
            self.calm = False  # one says it
        self._unexplained.clear()

    def find(self, member: Member | None, kind: str, detail: str) -> None:
        """Take note of something that must not be."""
        rank = None if member is None else member.rank
        log.info("rank %s, %s: %s", rank, kind, detail)
        plan = self.part.plan
        self._tally.findings.append(
            {
                "kind": kind,
                "job": self.part.job,
                "life": self.life,
                "rank": rank,
                "ranks": plan.ranks,
                "seed": plan.seed,
                "detail": detail,
                "errors": [] if member is None else member.errors[-5:],
                "words": "" if member is None else member.last_words(),
            }
        )

    def _bury(self, member: Member) -> None:
        code = member.bury()
        if not member.killed:
            self.find(member, "crash", f"the process ended with code {code}")

    def _take(self, member: Member, said: dict[str, Any]) -> None:
        counts = Counter(said["counts"])
        self._tally.counts.update(counts)
        # Who is too late within a node ends the node's clients.
        costly = COSTLY_TROUBLES + ("late",) * (self.part.nodes is not None)
        self.calm &= not any(counts[f"trouble {kind}"] for kind in costly)
        if self.settled and self.calm and counts["untroubled error"]:
            self._unexplained.append((member, said["errors"]))  # who leaves says so before it does
        for thread in member.right:
            member.right[thread] += counts[f"right of thread {thread}"]
        member.failed += counts["error"]
        member.steps = said["steps"]
        member.errors = [*member.errors, *said["errors"]][-20:]
        for error in said["errors"]:
            samples = self._tally.samples.setdefault(error.split(": ")[1], [])
            if len(samples) < SAMPLES:
                samples.append(error)
        for key, mask in said["masks"]:
            others = self._masks.setdefault(tuple(key), {})
            others[member.rank] = mask
            if len(set(others.values())) > 1:
                self.find(member, "wrong", f"call {key} is of different ranks' values: {others}")


def pump(jobs: Iterable[Job], seconds: float, others: Iterable[tuple[Job, Member]] = ()) -> None:
    """Hear what members say for a while; at least once, without waiting if that is 0."""
    whose = {m.connection: (job, m) for job in jobs for m in job.members if m.alive}
    whose.update({m.connection: (job, m) for job, m in others if m.alive})
    end = time.monotonic() + seconds
    while True:
        left = max(0.0, end - time.monotonic())
        ready = connection.wait(list(whose), left)
        for one in ready:
            job, member = whose[one]  # type: ignore[index]
            job.hear(member)
        for job in {job for job, _ in whose.values()}:
            job.judge()
        whose = {one: (job, member) for one, (job, member) in whose.items() if member.alive}
        if not ready or time.monotonic() >= end:
            return


def prepare() -> tempfile.TemporaryDirectory[str]:
    """Have ranks forked from a process that has imported everything; return a folder for them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    return tempfile.TemporaryDirectory(prefix="guarantee-")
