"""What networks do to a job on hosts of a lab, and what becomes of it; see `torture.faults`.

Every case is a function that is handed a `Scene`, brings its fault upon it, and returns a `Row`.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from harness import HarnessError, pool
from lab import Lab, packets
from lab.packets import Way
from torture.fault_job import Job, Told

WORKERS = 4
REDUCERS = 3
MBIT = 200.0
ELEMENTS = 128 * 1024  # 512 KiB: 28 ms over such links, so that a case is over in seconds
GONE = 1  # the reducer that faults are brought upon
FIRST = 3  # all-reduces before a fault, so that it hits a job that works
SETTLE_S = 20.0  # until a reducer that can be reached is in use again: the next agreement
STUCK_S = 20.0  # an all-reduce that takes so long is not going to end
NAMED_S = 10.0  # later errors count as missing


@dataclass
class Row:
    """What became of a case; bench/README.md defines the figures, NaN where there is none.

    Attributes:
        notes: what errors said, and whatever else explains the figures.
    """

    case: str
    all_reduces: int = 0
    wrong: int = 0
    errors: int = 0
    false_deaths: int = 0
    stall_s: float = 0.0
    detected_s: float = math.nan
    back_s: float = math.nan
    rate: float = math.nan
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether all results were right, and nobody was lost who was there."""
        return not (self.wrong or self.errors or self.false_deaths)


class Scene:
    """A job of four ranks and three reducers, each on a host of its own."""

    def __init__(self, lab: Lab, job: Job) -> None:
        self.lab = lab
        self.job = job
        self.workers = lab.hosts[:WORKERS]
        self.reducers = lab.hosts[WORKERS:]

    def begin(self, count: int) -> None:
        """Begin a generation of so many all-reduces, of which the first have ended."""
        self.job.begin(ELEMENTS, count)
        self.job.wait_for_steps(min(FIRST, count), NAMED_S)
        if self.job.done < min(FIRST, count):
            raise HarnessError(f"the job does not work: {self.job.told}")

    def finish(self) -> None:
        """Wait for the end of all ranks' parts, as long as they get on."""
        before = -1
        while not self.job.wait_for_end(STUCK_S) and self.job.done > before:
            before = self.job.done


@contextmanager
def stage(lab: Lab) -> Iterator[Scene]:
    """Start the job's processes; at the end of the block they are gone, and the lab as it was."""
    started = pool.start(lab.hosts[WORKERS:])
    try:
        with Job(lab, lab.hosts[:WORKERS], [reducer.address for reducer in started]) as job:
            yield Scene(lab, job)
    finally:
        for reducer in started:
            reducer.stop()
        for host in lab.hosts:
            packets.heal(host)
            lab.set_rate(host, MBIT)
            lab.link_up(host)


# -- nobody is gone -------------------------------------------------------------------------------


def healthy(scene: Scene, count: int) -> Row:
    """Nothing happens: what the other rates compare with."""
    scene.begin(count)
    scene.finish()
    return account("healthy", scene, count)


def loss(scene: Scene, count: int) -> Row:
    """Every worker loses 1 % of the packets it receives, and of those it sends."""
    for host in scene.workers:
        packets.lose(host, 1)
    scene.begin(count)
    scene.finish()
    return account("1 % loss", scene, count)


def slow(scene: Scene, count: int) -> Row:
    """One reducer's link has a tenth of the others' rate."""
    scene.lab.set_rate(scene.reducers[GONE], MBIT / 10)
    scene.begin(count)
    scene.finish()
    return account("slow reducer", scene, count)


# -- a reducer is gone for all, or for one rank ---------------------------------------------------


def pulled(scene: Scene, count: int) -> Row:
    host = scene.reducers[GONE]
    down, up = partial(scene.lab.link_down, host), partial(scene.lab.link_up, host)
    return _gone_and_back("reducer pulled", scene, count, down, up)


def partition(scene: Scene, count: int, way: Way) -> Row:
    """One rank and one reducer do not hear each other, or one of them the other."""
    rank, reducer = scene.workers[2], scene.reducers[GONE]
    names = {"both": "partition", "in": "rank does not hear", "out": "rank is not heard"}
    cut, heal = partial(packets.part, rank, reducer, way), partial(packets.heal, rank)
    return _gone_and_back(names[way], scene, count, cut, heal)


def _gone_and_back(
    case: str, scene: Scene, count: int, cut: Callable[[], None], heal: Callable[[], None]
) -> Row:
    """Bring a fault upon a job for a third of its all-reduces; all but that reducer are there."""
    job = scene.job
    scene.begin(0)
    job.wait_for_steps(count // 3, _patience(count))
    time.sleep(0.01)  # in the middle of an all-reduce
    start = time.monotonic()
    cut()
    job.wait_for_steps(job.done + max(1, count // 3), _patience(count))
    lost = [told.losses[0].at - start if told.losses else math.inf for told in job.told]
    healed = time.monotonic()
    heal()
    job.wait(
        lambda: (
            all(_used_again(told, healed) != math.inf for told in job.told)
            or any(told.over for told in job.told)
        ),
        SETTLE_S,
    )
    back = [_used_again(told, healed) for told in job.told]
    job.wait_for_steps(max(count, job.done + 1), _patience(count))
    row = account(case, scene, count, ended=False)
    row.detected_s, row.back_s = max(lost), max(back)
    for rank, told in enumerate(job.told):
        # The same one may be lost twice: when ranks agree on it before all know of the fault.
        false = [loss for loss in told.losses if loss.reducers != [GONE] or loss.at > healed]
        row.false_deaths += len(false)
        row.notes += tuple(
            f"rank {rank} lost {loss.reducers} {loss.at - healed:.3f} s after the fault had ended"
            for loss in false
        )
        row.notes += tuple(f"rank {rank}: {text}" for text in told.warnings if false)
    return row


def _used_again(told: Told, since: float) -> float:
    """Return after how long a rank used all reducers again, and still does."""
    if not told.losses:
        return math.nan
    first = math.inf
    for step in reversed(told.steps):
        if step.in_use < REDUCERS or step.at < since:
            break
        first = step.at
    return first - since


# -- a rank is gone -------------------------------------------------------------------------------


def rank_pulled(scene: Scene, count: int) -> Row:
    """Pull a rank's cable: everybody has an error, and later the next generation works."""
    job, gone = scene.job, 2
    scene.begin(0)
    job.wait_for_steps(count // 2, _patience(count))
    start = time.monotonic()
    scene.lab.link_down(scene.workers[gone])
    job.wait_for_failure(NAMED_S, range(WORKERS))
    scene.lab.link_up(scene.workers[gone])
    job.wait_for_end(NAMED_S)
    before = account("rank pulled", scene, 0, ended=False)
    failures = [told.failure for told in job.told]
    named = [failure.at - start if failure else math.inf for failure in failures]
    notes = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures)]
    missing = sum(
        failure is None or (rank != gone and failure.error != "RankLostError")
        for rank, failure in enumerate(failures)
    )
    misnamed = sum(failure is not None and failure.rank not in {None, gone} for failure in failures)
    left = max(FIRST, count - before.all_reduces)
    scene.begin(left)
    scene.finish()
    row = account("rank pulled", scene, left)
    row.all_reduces += before.all_reduces
    row.wrong += before.wrong
    row.errors += missing
    row.false_deaths += misnamed
    row.detected_s = max(named)
    row.notes += tuple(notes) if missing or misnamed else ()
    return row


# -- what became of it ----------------------------------------------------------------------------


def account(case: str, scene: Scene, count: int, *, ended: bool = True) -> Row:
    """Sum up what the ranks of a generation have told, of which `count` should have ended well.

    If it has `ended`, nobody may have lost anybody, and all ranks have left by themselves.
    """
    job = scene.job
    row = Row(case, all_reduces=job.done)
    for rank, told in enumerate(job.told):
        row.wrong += sum(step.wrong > 0 for step in told.steps)
        row.stall_s = max([row.stall_s, *(step.seconds for step in told.steps)])
        failure = told.failure
        if failure is not None:
            row.notes += (f"rank {rank}: {failure.error}: {failure.text}",)
            row.stall_s = max(row.stall_s, failure.seconds)
        short = len(told.steps) < count
        row.errors += int(short or (failure is not None and count > 0))
        if short and failure is None:
            code = job.ranks[rank].ended
            state = "its process runs" if code is None else f"its process ended with {code}"
            row.notes += (f"rank {rank} made {len(told.steps)} of {count} all-reduces, {state}",)
        if ended:
            row.false_deaths += len(told.losses)
        row.false_deaths += int(count > 0 and failure is not None and failure.rank is not None)
    spans = [told.steps[-1].at - told.joined for told in job.told if told.steps]
    if spans and row.all_reduces:
        row.rate = row.all_reduces * ELEMENTS * 4 / 1e6 / max(spans)
    return row


def _patience(count: int) -> float:
    return 20.0 + 0.5 * count
