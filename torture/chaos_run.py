"""The parent's side of `torture.chaos_worker`: a training whose reducers die and come back."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterable

from harness import HarnessError
from harness.pool import Pool
from harness.ranks import Ranks
from lab import Lab
from torture.chaos_blows import Blow
from torture.chaos_figures import Record

LISTEN_S = 0.02
PATIENCE_S = 60.0  # for what takes seconds on a busy machine
STEPS_ALONE = 30  # without a reducer that does not come back


class Training:
    """A training that goes on while reducers are ended and started.

    Args:
        ranks: its processes.
        reducers: theirs.
        workers: number of ranks.

    Attributes:
        record: what the ranks have reported.
    """

    def __init__(self, ranks: Ranks, reducers: Pool, workers: int) -> None:
        self.record = Record(workers)
        self._ranks = ranks
        self._pool = reducers

    def suffer(self, blow: Blow) -> None:
        """Let a blow happen, and wait until every rank has got over it.

        Raises:
            HarnessError: a rank failed, or has not got over it after `PATIENCE_S`.
        """
        self.rest(blow.rest_s)
        victim = blow.reducer
        if blow.failpoint:
            self._pool.end(victim, signal.SIGTERM)
            self._pool.launch(victim, REDUCTION_FAILPOINTS=blow.failpoint)
            self.until(lambda: self._pool.has_ended(victim), f"{blow.failpoint} is passed")
            self.record.blows.append(time.monotonic())
        else:
            self.record.blows.append(time.monotonic())
            self._pool.end(victim, blow.number)
        if not blow.comes_back:
            self.progress(STEPS_ALONE)
            return
        self._pool.start(victim)
        # Who has made two steps since has noticed: each needs all reducers that are in use.
        self.progress(2)
        self.until(lambda: self.record.all_use(victim), f"all ranks use reducer {victim} again")

    def progress(self, steps: int) -> None:
        """Wait until every rank has made some steps more than any has now."""
        while self._hear(0.0):
            pass  # what they have said in the meantime
        goal = self.record.most_steps + steps
        self.until(lambda: self.record.least_steps >= goal, f"all ranks make step {goal}")

    def rest(self, seconds: float) -> None:
        """Let it train for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._hear(left)

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Let it train until something is so."""
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                made = f"steps made by rank: {self.record.steps}"
                raise self._ranks.stalled(f"{PATIENCE_S:g} s did not suffice until {what}; {made}")
            self._hear(LISTEN_S)

    def finish(self) -> None:
        """Let all ranks stop at the same step."""
        self._ranks.tell("stop")
        self.wait()

    def wait(self) -> None:
        """Wait until all ranks have stopped."""
        heard = time.monotonic()
        while self._ranks.running:
            if self._hear(LISTEN_S):
                heard = time.monotonic()
            elif time.monotonic() - heard > PATIENCE_S:
                raise self._ranks.stalled(f"no rank has made a step for {PATIENCE_S:g} s")

    def _hear(self, patience_s: float) -> bool:
        said = self._ranks.hear(patience_s)
        if said is not None:
            self.record.add(said)
        return said is not None


def train(
    lab: Lab,
    workers: int,
    blows: Iterable[Blow],
    *,
    seed: int,
    steps: int | None = None,
    pause_s: float = 0.0,
) -> Record:
    """Train on a lab with a host per worker and one per reducer.

    Args:
        lab: the first hosts are the workers', all others the reducers'.
        workers: number of ranks.
        blows: what happens to reducers, one after the other.
        seed: of the data.
        steps: how many to make; None: until all blows have happened.
        pause_s: time between two steps.

    Raises:
        HarnessError: a process failed; the message holds the end of what it said.
    """
    reducers = Pool(lab.hosts[workers:])
    arguments = {"seed": seed, "steps": steps, "pause_s": pause_s}
    try:
        with Ranks(
            "torture.chaos_worker", lab.hosts[:workers], arguments, reducers.addresses
        ) as ranks:
            training = Training(ranks, reducers, workers)
            training.progress(2)
            for blow in blows:
                training.suffer(blow)
            if steps is None:
                training.finish()
            training.wait()
            return training.record
    except subprocess.TimeoutExpired as error:
        raise HarnessError(f"a reducer did not end: {error}") from None
    finally:
        reducers.stop()
