"""Jobs of every topology whose ranks and reducers are killed, stopped and started again, or join.

Each row of the table is a topology, how many ranks and reducers there are, and what happens to them
in which order. The ranks (`job_rank`) hold every result against NumPy's, and `check_alike` holds
the ranks against each other; what else has to come of a row depends on its topology.
"""

import json
import os
import random
import re
import signal
import sys
import time
from collections import defaultdict
from itertools import pairwise

import pytest

pytest.importorskip("torch", reason="needs torch")

from harness.pool import Pool
from harness.ranks import Ranks
from tests.integration.calls import until_stopped
from tests.ranks import Loopback

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops processes as Linux does")

PATIENCE_S = 60.0
CONTINUE = {"REDUCTION_ON_RANK_LOST": "continue"}
FALLBACK = {"REDUCTION_FALLBACK": "process-group"}
GROUP = {"group": "all"}
JOINS = {"group": "own", "trains": True, "rest_s": 0.01}
TOPOLOGIES = {  # the environment of ranks, and the `Spec` of `job_rank`
    "pool": ({"REDUCTION_PATIENCE": "2s"}, {}),
    # What ranks agree on in many steps at full speed, they agree on seldom.
    "pool, slow": ({}, {"rest_s": 1.0, "warm": 60}),
    "pool, fast": ({}, {"rest_s": 0.02, "warm": 60}),
    "pool, faster": ({}, {"rest_s": 0.002}),
    "pool, impatient": ({"REDUCTION_PATIENCE": "2s"}, {}),
    "patient": ({"REDUCTION_PATIENCE": "4s"}, {}),
    "very patient": ({"REDUCTION_PATIENCE": "10s"}, {}),
    "elastic": (CONTINUE, {}),
    "elastic, computing": (CONTINUE, {"rest_s": 0.3}),
    "elastic, embedded": (CONTINUE, GROUP),
    "elastic, embedded, computing": (CONTINUE, GROUP | {"rest_s": 0.3}),
    **{
        f"embedded, {name} leaves first": ({}, GROUP | {"stays_s": 0.3, "first": first})
        for first, name in enumerate(("rank 0", "rank 1", "rank 2"))
    },
    "mixed": ({"REDUCTION_EMBEDDED": "1"}, GROUP),
    "DDP": ({}, GROUP | {"trains": True}),
    "elastic DDP": (CONTINUE, GROUP | {"trains": True}),
    "fallback": (FALLBACK, GROUP),
    "fallback, elastic": (FALLBACK | CONTINUE, GROUP),
    "joining": (CONTINUE | {"REDUCTION_TIMEOUT": "40s"}, JOINS),
}


class Job:
    """A job, and what its ranks have said; its methods without an underscore are a row's moves.

    Attributes:
        alive: numbers of the processes of ranks that were not killed.
        steps: what was said of each step, by its number and by rank.
        latest: what each process said last of a step.
        errors, ends: what each process ended with.
        warned: what each process warned of.
    """

    def __init__(self, lab, ranks, pool, workers):
        self.alive = set(range(workers))
        self.workers = workers
        self.steps = defaultdict(dict)
        self.latest = {}
        self.errors = {}
        self.ends = {}
        self.warned = defaultdict(list)
        self._lab, self._ranks, self._pool = lab, ranks, pool
        self._started = workers
        self._stopped = []

    @property
    def here(self):
        """What the processes that are alive have said last."""
        return [self.latest[process] for process in sorted(self.alive)]

    def _heard(self):
        return self.alive <= self.latest.keys()

    def play(self, moves):
        for move in moves.split("; "):
            name, *arguments = move.split()
            getattr(self, name)(*map(json.loads, arguments))

    def _until(self, done, fails=False):
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                raise self._ranks.stalled(f"of {self.alive}: {self.latest}, {self.errors}")
            self._hear(0.05)
            assert fails or not self.errors

    def _hear(self, patience_s):
        said = self._ranks.hear(patience_s)
        if said is None:
            return False
        process, event = said["process"], said["event"]
        if event == "step":
            self.steps[said["step"]][said["rank"]] = self.latest[process] = said
        elif event == "warning":
            self.warned[process].append(said["text"])
        else:
            {"error": self.errors, "end": self.ends}[event][process] = said
        return True

    def kill(self, process):
        self.alive.discard(process)
        self._ranks.kill(process)

    def join(self):
        self._ranks.start(self._lab, REDUCTION_JOIN="1", PROCESS=str(self._started))
        self.alive.add(self._started)
        self._started += 1

    def end(self, *reducers, number=signal.SIGKILL):
        for reducer in reducers:
            self._pool.end(reducer, number)

    def drain(self, *reducers):
        self.end(*reducers, number=signal.SIGTERM)

    def start(self, *reducers):
        for reducer in reducers:
            self._pool.start(reducer)

    def stop(self, *processes):
        self._stop(self.latest[process]["pid"] for process in processes)

    def stop_reducers(self, *reducers):
        self._stop(self._pool.reducers[reducer].pid for reducer in reducers)

    def _stop(self, pids):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            until_stopped(pid)
            self._stopped.append(pid)

    def resume(self, count):
        """The processes that were stopped last go on."""
        for _ in range(count):
            os.kill(self._stopped.pop(), signal.SIGCONT)

    def rest(self, seconds):
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() > end)

    def go(self, steps):
        """All ranks make some steps from now on."""
        while self._hear(0.0):
            pass  # what they have said in the meantime
        goal = max(self.steps, default=0) + steps
        self._until(lambda: self._heard() and min(one["step"] for one in self.here) >= goal)

    def settle(self):
        """The ranks that are present make some steps."""
        goal = [0]

        def among_themselves():
            if not self._heard():
                return False
            here = {one["rank"] for one in self.here}
            if any(set(one["present"]) != here for one in self.here):
                goal[0] = max(one["step"] for one in self.here) + 3
            return min(one["step"] for one in self.here) >= goal[0]

        self._until(among_themselves)

    def back(self, times, *reducers):
        """All ranks have gone back so often, now to these reducers, and go on there."""
        self._until(lambda: min(one["returns"] for one in self.here) >= times)
        self.go(2)  # what was under way
        self.calm(1)
        self.use(*reducers)

    def fall(self, times):
        """All ranks have gone to the process group so often."""
        self._until(lambda: all(self.fallen(process) >= times for process in self.alive))
        self.go(2)

    def fallen(self, process):
        """How often a rank has said that it does."""
        return sum("go through the process group" in text for text in self.warned[process])

    def calm(self, tries=100):
        """All ranks go on at reducers, after some tries in which they go back and forth."""
        for _ in range(tries):
            before = [one["fallbacks"] for one in self.here]
            self.go(5)
            if before == [one["fallbacks"] for one in self.here]:
                return
        raise AssertionError("they go through the process group")

    def use(self, *reducers):
        """These are the reducers that all ranks use."""
        wanted = [at in reducers for at in range(len(self._pool.reducers))]
        self._until(lambda: all(one["in_use"] == wanted for one in self.here))

    def fail(self):
        """All ranks that are left fail."""
        self._until(lambda: self.errors.keys() == self.alive, fails=True)

    def finish(self):
        if not self.errors:
            self._ranks.tell(str(max(self.steps) + 20))
            self._until(lambda: self.ends.keys() >= self.alive)
        self._until(lambda: not self._ranks.running, fails=True)


def run(row):
    """Have a row happen to a job of its topology, and return the job when it has ended."""
    topology, sizes, moves = ROW.fullmatch(row).groups()
    workers, reducers = map(int, sizes.split("+"))
    environment, spec = TOPOLOGIES[topology]
    with Loopback(workers + reducers) as lab:
        pool = Pool(lab.hosts[workers:])
        module, hosts = "tests.integration.job_rank", lab.hosts[:workers]
        try:
            with Ranks(module, hosts, spec, pool.addresses, environment) as ranks:
                job = Job(lab, ranks, pool, workers)
                job.go(2)
                job.play(moves)
                job.finish()
        finally:
            pool.stop()
    check_alike(job)
    return job


ROW = re.compile(r"(.*\S) (\d+\+\d+): (.*)")
ALIKE = ("digest", "over", "odd", "whose")


def check_alike(job):
    """The ranks of a step have the same, of which each has a part."""
    for step, said in sorted(job.steps.items()):
        # What a rank had that was killed since, the others may have made again without it.
        left = [its for rank, its in said.items() if "whose" not in its or rank in job.alive]
        assert all(its.get(what) == left[0].get(what) for its in left for what in ALIKE), said
        for rank, its in said.items():
            for whose in (*its.get("whose", ()), its.get("over"), its.get("named")):
                assert whose is None or rank in whose, f"step {step}: {said}"
    if not job.errors:
        here = sorted(one["rank"] for one in job.here)
        assert all(one["present"] == here for one in job.here)


def nobody_lost(job, row):
    assert [one["losses"] for one in job.here] == [0] * job.workers


def ranks_host_reducers(job, row):
    """All do if there are fewer others; in whatever order they leave, nobody misses a result."""
    pool = int(ROW.fullmatch(row)[2].partition("+")[2])
    assert all(one["in_use"] == [True] * (pool + 3 * (pool < 3)) for one in job.here)


def all_used(job, row):
    assert all(all(one["in_use"]) for one in job.here)


def trains_as_undisturbed(job, row):
    """No step is lost, and no bit differs."""
    alone = run(f"{row.partition('DDP')[0]}DDP 2+1: go {max(job.steps)}")
    for step, said in job.steps.items():
        assert said[0]["digest"] == alone.steps[step][0]["digest"]
    assert all(one["losses"] >= row.count("end ") + row.count("drain ") for one in job.here)
    assert any(one["moved"] for one in job.here)


def goes_on(job, row):
    """Each result is of all ranks that were left then, or that were left a step later."""
    mine = min(job.alive)
    steps = [
        job.steps[step][mine]["whose"] for step in sorted(job.steps) if mine in job.steps[step]
    ]
    found = [[frozenset(whose) for whose in step if whose] for step in steps if any(step)]
    assert set(found[0]) == {frozenset(range(job.workers))}
    if row.endswith("fail"):  # the ranks that are left are a minority
        assert job.errors.keys() == job.alive == {4, 5}
        assert all(one["error"].startswith("RankLostError: rank ") for one in job.errors.values())
    else:
        assert set(found[-1]) == {frozenset(job.alive)}
    # Of calls that were in flight together, a later one may have been finished with a rank that an
    # earlier one was made again without.
    for earlier, later in pairwise(found):
        assert frozenset.union(*later) <= frozenset.intersection(*earlier)


def trains_on(job, row):
    """Rank 0 gives the others its buffers, until it is lost."""
    mine = [said[2]["digest"] for said in job.steps.values() if 2 in said]
    assert len(set(mine)) == len(mine)


def falls_back(job, row):
    for process, end in job.ends.items():
        one, back = job.latest[process], row.count("; back ")
        if "calm" not in row:
            assert job.fallen(process) == row.count("; fall ")
            assert sum("go through them again" in text for text in job.warned[process]) == back
            assert one["returns"] == back
        assert end["differ"].startswith("MismatchError: ")
        assert "total_bytes" in end["differ"]
    steps = [said for of_ranks in job.steps.values() for said in of_ranks.values()]
    for said in (*steps, *(end["after"] for end in job.ends.values())):
        assert all(whose in (None, [*range(job.workers)]) for whose in said["whose"])
        assert said["odd"]


def joins(job, row):
    losses = [next(iter(job.steps[step].values()))["loss"] for step in sorted(job.steps)]
    assert losses[-1] < 0.7 * losses[0]
    for process in job.alive - set(range(job.workers)):
        one = job.latest[process]
        assert one["rank"] in one["changes"][0][1], "it is told of itself"
    if row.endswith("kill 0; settle"):
        assert all(one["changes"][-1][2] == [0] for one in job.here)


COMES = {
    "pool": nobody_lost,
    **dict.fromkeys((one for one in TOPOLOGIES if one.startswith("pool, ")), all_used),
    "embedded": ranks_host_reducers,
    "mixed": ranks_host_reducers,
    "DDP": trains_as_undisturbed,
    "patient": nobody_lost,
    "very patient": nobody_lost,
    "elastic": goes_on,
    "elastic DDP": trains_on,
    "fallback": falls_back,
    "joining": joins,
}


def lost_or_joined_with_reducers():
    rng, here, started, moves = random.Random(0), set(range(4)), 4, []
    for change in range(50):
        if len(here) > 3 and (len(here) > 5 or rng.random() < 0.5):
            victim = rng.choice(sorted(here))
            here.discard(victim)
            moves.append(f"kill {victim}")
        else:
            here.add(started)
            started += 1
            moves.append("join")
        # All use it before the other one is killed.
        moves.append(f"end {change % 2}; start {change % 2}; settle; use 0 1")
    return f"joining 4+2: settle; {'; '.join(moves)}"


def rolling(begin, move):
    """Each of three reducers in turn is ended, and used by all ranks again before the next one."""
    moves = (f"{move} {one}; go 2; start {one}; use 0 1 2" for one in range(3))
    return f"{begin}; {'; '.join(moves)}"


ROWS = """
elastic 6+2: kill 1; settle; kill 0; kill 2; kill 3; fail
elastic, embedded 3+0: kill 1; settle
elastic DDP 4+2: kill 0; settle; kill 1; settle
embedded, rank 0 leaves first 3+0: go 6
mixed 3+1: go 6
fallback 3+2: drain 0 1; fall 1; go 8; start 0 1; back 1 0 1; end 0 1; fall 2; start 1; back 2 1
fallback, elastic 3+1: stop 1; rest 0.3; end 0; resume 1; fall 1; go 3
patient 3+2: stop 1; rest 2; resume 1; go 10
"""
EXTENDED = """
elastic 4+2: kill 1; settle
elastic 3+1: kill 1; settle
elastic, computing 3+2: kill 1; settle
elastic, embedded, computing 3+0: kill 1; settle
elastic 3+2: kill 0; settle
elastic 5+2: kill 4; settle; kill 2; settle; kill 1; settle; kill 3; settle
elastic 5+3: kill 3; kill 4; settle
elastic 5+3: kill 1; rest 1; kill 0; settle
elastic 5+3: kill 0; rest 0.3; kill 4; settle
elastic 4+3: kill 2; end 1; settle; end 0; go 3
embedded, rank 1 leaves first 3+0: go 6
embedded, rank 2 leaves first 3+0: go 6
mixed 3+2: go 6
mixed 3+3: go 6
fallback 4+3: end 0 1 2; fall 1; go 8
fallback 4+3: drain 0 1 2; fall 1; go 8
fallback 3+2: end 0 1; fall 1; start 0 1; back 1 0 1; end 0 1; fall 2; start 0 1; back 2 0 1
fallback 2+3: end 0; go 5; end 1; go 5; end 2; fall 1; go 3
fallback 3+1: end 0; go 2; start 0; rest 0.3; end 0; go 2; start 0; rest 0.3; end 0; start 0; calm
joining 4+2: settle; kill 1; settle; join; settle; join; join; settle; kill 0; settle
very patient 3+2: stop 1; rest 5; resume 1; go 10
pool 2+2: stop_reducers 0 1; rest 0.4; stop 0 1; rest 2.5; resume 2; rest 0.4; resume 2; go 2
pool 2+2: stop 0 1; rest 0.4; stop_reducers 0 1; rest 2.5; resume 2; rest 0.4; resume 2; go 2
pool, impatient 2+2: stop_reducers 0; use 1; resume 1; use 0 1
DDP 2+3: end 1; go 6; end 0; go 6
"""
EXTENDED = [
    *EXTENDED.strip().splitlines(),
    lost_or_joined_with_reducers(),
    *(
        rolling(begin, move)
        for begin in (
            *(f"pool, {pace} 3+3: go 60" for pace in ("slow", "fast", "faster")),
            "DDP 2+3: go 2",
        )
        for move in ("drain", "end")
    ),
]


@pytest.mark.parametrize(
    "row",
    [
        *ROWS.strip().splitlines(),
        *(pytest.param(row, id=row[:90], marks=pytest.mark.extended) for row in EXTENDED),
    ],
)
def test_faults(row):
    topology = ROW.fullmatch(row)[1]
    (COMES.get(topology) or COMES[topology.partition(",")[0]])(run(row), row)
