"""All contenders alive side by side, measured in turn, round after round."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import theory
from bench.contenders import KEY, Contender
from bench.crew import REPLY_S, Control, Crew, unavailable
from bench.results import Row
from harness import HarnessError, pool
from lab import Lab
from reducer.commands.keygen import keygen

BLOCK_S = 0.5  # a round's share of one contender, unless one all-reduce takes longer
MOST = 2000  # iterations in a block
SLOW = 20e6  # bytes per second that any contender should reach unshaped, even on few cores
ITEM = 4  # bytes of an fp32 element


def hosts_needed(workers: int, contenders: Sequence[Contender]) -> int:
    """Return how many hosts a lab must have: dedicated reducers have hosts of their own."""
    return workers + max((contender.reducers for contender in contenders), default=0)


@dataclass(frozen=True)
class Step:
    """Several all-reduces that are measured as one, with the name under which they were asked for.

    Attributes:
        groups: bytes of the buffers that are begun together, group by group; each group is waited
            for before the next one begins.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(map(sum, self.groups))

    @property
    def counts(self) -> list[list[int]]:
        """Elements of the buffers."""
        return [[nbytes // ITEM for nbytes in group] for group in self.groups]


@dataclass
class Tally:
    """What was measured of one contender at one size.

    Attributes:
        rounds: by round, what `durations` says.
        worker_cpu, reducer_cpu: processor seconds of all ranks, or reducers, in timed iterations.
        wrong: of the elements that were checked.
    """

    rounds: list[list[float]] = field(default_factory=list)
    worker_cpu: float = 0.0
    reducer_cpu: float = 0.0
    wrong: int = 0
    checked: int = 0

    @property
    def time_s(self) -> float:
        """Median over the rounds of their medians."""
        return statistics.median(statistics.median(times) for times in self.rounds)

    @property
    def mean_s(self) -> float:
        """Median over the rounds of their means."""
        return statistics.median(statistics.fmean(times) for times in self.rounds)

    @property
    def iterations(self) -> int:
        """Timed all-reduces in all rounds."""
        return sum(len(times) for times in self.rounds)


class Contest:
    """The processes of all contenders in a lab.

    Attributes:
        skipped: contenders that cannot be measured (any more), and why.
        payload_rates: that of a link over so many streams, in bytes/s; empty if it is not shaped.
    """

    def __init__(
        self, lab: Lab, workers: int, contenders: Sequence[Contender], *, streams: int = 1
    ) -> None:
        self.skipped: dict[str, str] = {}
        self.payload_rates: list[float] = []
        self._lab = lab
        self._workers = workers
        self._streams = streams
        self._contenders = contenders
        self._crews: list[Crew] = []
        self._reducers: dict[str, list[pool.Reducer]] = {}
        self._keys = Path()  # what `reducer keygen` has made, if a contender needs it

    def start(self, stack: ExitStack) -> None:
        """Start all processes, which end with the stack."""
        if self._lab.mbit is not None:
            self.payload_rates.append(self._lab.payload_rate(self._streams))
        self._start_reducers(stack)
        control = Control()
        stack.callback(control.close)
        for contender in self._contenders:
            if reason := unavailable(contender):
                self.skipped[contender.name] = reason
                continue
            servers = tuple(reducer.address for reducer in self._reducers[contender.name])
            keys = str(self._keys / "jobs" / KEY) if contender.keyed else ""
            crew = Crew(contender, self._lab, self._workers, servers, keys)
            stack.callback(crew.stop)
            crew.start(control)
            self._crews.append(crew)
        control.gather(self._crews)
        for crew in self._crews:
            self._attempt(crew, crew.join)

    def measure(self, size: int | Step, *, rounds: int, iterations: int | None = None) -> list[Row]:
        """Measure all contenders that are still there at one size, in turn and back.

        Args:
            size: bytes of the buffer at each rank, or a step of several all-reduces.
            rounds: how often each has its turn.
            iterations: all-reduces per turn; None for as many as take about `BLOCK_S`.
        """
        tallies = {crew.name: Tally() for crew in self._crews}
        for turn in range(rounds):
            for crew in self._crews[:: -1 if turn % 2 else 1]:
                self._attempt(crew, self._block, crew, tallies[crew.name], size, iterations)
        alive = [crew.contender for crew in self._crews if not crew.failure]
        nbytes = size if isinstance(size, int) else size.nbytes
        rows = [self._row(each, tallies[each.name], nbytes) for each in alive]
        baselines = [row for row in rows if not row.ours]
        for row in rows:
            for other in baselines if row.ours else ():
                ratio = row.algbw / other.algbw
                row.ratios[other.contender] = ratio
                if self.payload_rates:
                    row.card_ratios[other.contender] = ratio * other.cards / row.cards
        return rows

    def ask(self, name: str, action: str, **arguments: Any) -> list[dict[str, Any]]:
        """Give all ranks of a contender a command; their replies, in rank order."""
        (crew,) = (crew for crew in self._crews if crew.name == name)
        return crew.ask(action, **arguments)

    def pids(self, name: str) -> dict[str, int]:
        """Return process ids of a contender and its reducers, by names such as ``worker 0``."""
        (crew,) = (crew for crew in self._crews if crew.name == name)
        workers = {f"worker {rank}": pid for rank, pid in enumerate(crew.pids)}
        reducers = {f"reducer {i}": reducer.pid for i, reducer in enumerate(self._reducers[name])}
        return workers | reducers

    def _start_reducers(self, stack: ExitStack) -> None:
        n, hosts = self._workers, self._lab.hosts
        for shared in {contender.pool for contender in self._contenders}:
            alike = [contender for contender in self._contenders if contender.pool == shared]
            keyed = alike[0].keyed
            if keyed:
                self._keys = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                keygen(self._keys, [KEY])
            there = hosts[n : hosts_needed(n, alike)]
            reducers = pool.start(there, str(self._keys / "pool") if keyed else "", alike[0].root)
            for reducer in reducers:
                stack.callback(reducer.stop)
            for contender in alike:
                self._reducers[contender.name] = reducers[: contender.reducers]

    def _attempt(self, crew: Crew, action: Any, *arguments: Any) -> None:
        """Do something with a crew; one that fails is out, and the others go on."""
        if crew.failure:
            self.skipped[crew.name] = crew.failure
            return
        try:
            action(*arguments)
        except HarnessError as error:
            self.skipped[crew.name] = str(error)

    def _block(self, crew: Crew, tally: Tally, size: int | Step, iterations: int | None) -> None:
        step = {} if isinstance(size, int) else {"groups": size.counts}
        nbytes = size if isinstance(size, int) else size.nbytes
        count = nbytes // ITEM
        estimate = tally.time_s if tally.rounds else 0.0
        slow_s = estimate or self._workers * nbytes / next(iter(self.payload_rates), SLOW)
        # Comparing costs a further all-reduce: where that takes long, the first round's must do.
        check = estimate < BLOCK_S
        patience_s = REPLY_S + 10 * slow_s
        replies = crew.ask("prepare", patience_s=patience_s, count=count, check=check, **step)
        if "ends" not in replies[0]:
            crew.fail("it is older than this way of timing: copy bench/worker.py to its checkout")
            raise HarnessError(crew.failure)
        if check:
            tally.wrong += sum(reply["wrong"] for reply in replies)
            tally.checked += count * self._workers
        estimate = estimate or durations(replies)[0]
        if estimate < BLOCK_S:
            estimate = min(durations(crew.ask("run", iterations=2)))
        length = iterations or max(1, min(MOST, round(BLOCK_S / estimate)))
        before = self._reducer_cpu(crew)
        patience_s = REPLY_S + 10 * length * estimate
        replies = crew.ask("run", patience_s=patience_s, iterations=length)
        tally.reducer_cpu += self._reducer_cpu(crew) - before
        tally.worker_cpu += sum(reply["cpu_seconds"] for reply in replies)
        tally.rounds.append(durations(replies))
        crew.ask("release")

    def _reducer_cpu(self, crew: Crew) -> float:
        return sum(pool.cpu_seconds(reducer.pid) for reducer in self._reducers[crew.name])

    def _row(self, contender: Contender, tally: Tally, nbytes: int) -> Row:
        n, rate = self._workers, next(iter(self.payload_rates), None)
        gigabytes = nbytes * tally.iterations / 1e9
        algbw = nbytes / tally.time_s
        return Row(
            contender=contender.name,
            ours=contender.ours,
            workers=n,
            reducers=contender.reducers,
            cards=n + contender.reducers,
            nbytes=nbytes,
            count=nbytes // ITEM,
            dtype="float32",
            op="sum",
            iterations=tally.iterations,
            rounds_us=[1e6 * statistics.median(times) for times in tally.rounds],
            time_us=1e6 * tally.time_s,
            mean_us=1e6 * tally.mean_s,
            p99_us=1e6 * float(np.percentile([t for times in tally.rounds for t in times], 99)),
            algbw=algbw,
            busbw=algbw * theory.bus_factor(n),
            wrong=tally.wrong,
            checked=tally.checked,
            exact=contender.ours,
            payload_share=algbw / rate if rate else None,
            limit=theory.limit(contender, n, rate) if rate else None,
            worker_cpu_s_per_gb=tally.worker_cpu / n / gigabytes,
            reducer_cpu_s_per_gb=(
                tally.reducer_cpu / gigabytes if self._reducers[contender.name] else None
            ),
            ratios={},
            card_ratios={},
        )


def durations(replies: list[dict[str, Any]]) -> list[float]:
    """Return, by iteration, the seconds from one end at the last rank to the next.

    A rank that ends late begins the next one late, and others wait for it there: the longest of the
    ranks' own times would count that twice, and a series longer than it took.
    """
    last = [max(ends) for ends in zip(*(reply["ends"] for reply in replies), strict=True)]
    begun = min(reply["begun"] for reply in replies)
    return [end - before for before, end in zip([begun, *last[:-1]], last, strict=True)]
