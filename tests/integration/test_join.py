"""Ranks leave a training and join it: the ranks that are there have the same bits in every step."""

import random
import signal
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness.pool import Pool
from harness.ranks import Ranks
from reducer.errors import ConfigError, MismatchError, ReductionTimeout
from tests.integration.calls import ones
from tests.ranks import Loopback, environments, ranks
from tests.waits import within_s
from worker_client.client.bootstrap import connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")

PATIENCE_S = 60.0
MODULE = "tests.integration.join_rank"


class Training:
    """A training whose ranks come and go, its reducers, and what the ranks have said."""

    def __init__(self, lab, ranks, pool, workers):
        self.pool = pool
        self.present = set(range(workers))  # processes
        self.steps = defaultdict(dict)  # by step and rank
        self.latest = {}  # by process
        self._started = workers
        self.ended = set()
        self.missed = False
        self._lab = lab
        self._ranks = ranks

    def kill(self, process):
        self.present.discard(process)
        self._ranks.kill(process)

    def join(self):
        self._ranks.start(self._lab, REDUCTION_JOIN="1", PROCESS=str(self._started))
        self.present.add(self._started)
        self._started += 1

    def until(self, done):
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                raise self._ranks.stalled(f"{self.present}: {self.latest}")
            said = self._ranks.hear(0.05)
            if said is None:
                continue
            if said["event"] == "missed":
                self.missed = True
            elif said["event"] == "end":
                self.ended.add(said["process"])
            else:
                self.steps[said["step"]][said["rank"]] = self.latest[said["process"]] = said

    def rest(self, seconds):
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def settle(self, steps=3):
        """Wait until those that are here have made some steps among themselves."""
        until = [0]

        def among_themselves():
            here = [self.latest.get(process) for process in self.present]
            ranks = {one["rank"] for one in here if one}
            if any(one is None or set(one["present"]) != ranks for one in here):
                until[0] = max((one["step"] for one in here if one), default=0) + steps
                return False
            return min(one["step"] for one in here if one) >= until[0]

        self.until(among_themselves)

    def all_in_use(self):
        """Whether every rank that is here uses all reducers."""
        return all(self.latest[process]["all_in_use"] for process in self.present)

    def finish(self):
        self._ranks.tell(str(max(self.steps) + 20))
        self.until(lambda: self.ended >= self.present)
        self.until(lambda: not self._ranks.running)

    def check(self):
        """Hold every step against its own ranks, and the last loss against the first."""
        for step, said in sorted(self.steps.items()):
            one = next(iter(said.values()))
            for rank, other in said.items():
                assert other["digest"] == one["digest"], f"step {step}: {rank} has other weights"
                assert other["over"] == one["over"], f"step {step}"
                assert rank in other["over"], f"step {step}: {other['over']}"
                assert rank in other["named"], f"step {step}: {other['named']}"
        losses = [next(iter(self.steps[step].values()))["loss"] for step in sorted(self.steps)]
        assert losses[-1] < 0.7 * losses[0]


def run(workers, reducers, action, **settings):
    with Loopback(workers + reducers) as lab:
        pool = Pool(lab.hosts[workers:])
        try:
            arguments = {"REDUCTION_JOB": "grows", "REDUCTION_TIMEOUT": "40s", **settings}
            hosts = lab.hosts[:workers]
            with Ranks(MODULE, hosts, {}, pool.addresses, arguments) as ranks:
                training = Training(lab, ranks, pool, workers)
                training.settle()
                action(training)
                training.settle()
                training.finish()
        finally:
            pool.stop()
    training.check()
    return training


@pytest.mark.extended("test_a_rank_that_is_lost_and_one_that_takes_its_place")
def test_four_ranks_become_three_four_six_and_five():
    def action(training):
        training.kill(1)
        training.settle()
        training.join()
        training.settle()
        for _ in range(2):
            training.join()
        training.settle()
        training.kill(0)
        training.settle()

    training = run(4, 2, action)
    sizes = [len(next(iter(said.values()))["over"]) for _, said in sorted(training.steps.items())]
    found = [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]
    assert found[:3] == [4, 3, 4]
    assert found[-2:] == [6, 5]
    assert training.present == {2, 3, 4, 5, 6}
    latest = training.latest[6]
    assert latest["changes"][0][1] == [latest["rank"]]
    assert latest["changes"][-1][2] == [0]


@pytest.mark.extended("test_a_rank_that_is_lost_and_one_that_takes_its_place")
@pytest.mark.parametrize("missed", ["admission", "meeting", "decision"])
def test_some_have_gone_on_with_a_newcomer_and_others_not_when_a_rank_is_lost(missed):
    """Rank 1 lacks the admission, or the last result of the meeting with rank 3; rank 2 dies.

    Or no rank that is left has the admission: then rank 3 is not let in, and asks again.
    """

    def action(training):
        training.join()
        training.until(lambda: training.missed)
        training.rest(0.5)  # the others have it and go on
        training.kill(2)

    training = run(3, 2, action, MISSES=missed)
    assert training.latest[3]["present"] == [0, 1, 3]


@pytest.mark.extended("test_a_rank_that_is_lost_and_one_that_takes_its_place")
@pytest.mark.parametrize("seed", range(2))
def test_ranks_are_lost_while_others_join(seed):
    rng = random.Random(seed)

    def action(training):
        for _ in range(4):
            training.join()
            training.rest(rng.choice((0.0, 0.5, 1.0, 2.0)))
            training.kill(rng.choice(sorted(training.present)))
            training.settle()

    run(4, 2, action)


@pytest.mark.extended("test_a_rank_that_is_lost_and_one_that_takes_its_place")
def test_many_changes_while_reducers_come_and_go():
    rng = random.Random(0)

    def action(training):
        for change in range(50):
            if len(training.present) > 3 and (len(training.present) > 5 or rng.random() < 0.5):
                training.kill(rng.choice(sorted(training.present)))
            else:
                training.join()
            reducer = change % 2
            training.pool.end(reducer, signal.SIGKILL)
            training.pool.start(reducer)
            training.settle()
            training.until(training.all_in_use)  # before the other one is killed

    run(4, 2, action)


CONTINUE = {"on_rank_lost": "continue", "timeout": "30s"}


class Newcomer:
    """A rank that joins, in a thread of this process."""

    def __init__(self, servers, job, arguments):
        self.client = None
        self.error = None
        defaults = {"servers": servers, "job": job, "join": True, **CONTINUE}
        self._arguments = {**defaults, **arguments}
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self.client = connect(**self._arguments)
        except BaseException as error:  # noqa: BLE001 (the test's own thread looks at it)
            self.error = error

    def end(self):
        self.thread.join()
        if self.client is not None:
            self.client.shutdown()


@pytest.fixture
def newcomers(servers, request):
    """Make ranks that want to join the test's job."""
    made = []

    def make(**arguments):
        made.append(Newcomer(servers, request.node.name[:100], arguments))
        return made[-1]

    yield make
    for newcomer in made:
        newcomer.end()


def each(clients, what):
    """What a collective call returns or raises at each rank."""

    def call(client):
        try:
            return what(client)
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            return error

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(call, clients))


def admit_until(clients, done):
    """Let the ranks make steps until they report something."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found = each(clients, lambda client: client.admit())
        if done(found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"it has not come to that: {found}")


def total(clients, name=None):
    def call(client):
        given = np.full(1000, 10.0**client.rank)
        client.all_reduce(given, "sum", name=name).wait(30)
        assert len(set(given)) == 1
        return float(given[0])

    return each(clients, call)


def test_calls_of_all_kinds_include_every_rank_that_has_joined(job, newcomers):
    clients = job(2, **CONTINUE)
    assert total(clients, "named") == [11, 11]
    before = clients[0].calls
    told = []
    clients[1].on_membership(told.append)
    newcomer = newcomers()
    admit_until(clients, lambda found: found == [True, True])
    newcomer.thread.join()
    assert newcomer.client is not None
    newcomer.client.on_membership(told.append)
    assert [(change.present, change.joined, change.lost) for change in told] == [
        ((0, 1, 2), (2,), ())
    ] * 2
    everybody = [*clients, newcomer.client]
    assert newcomer.client.admit()  # as the others' that has let it in
    assert each(everybody, lambda client: client.admit()) == [False] * 3
    assert total(everybody) == total(everybody, "named") == [111] * 3
    assert [(client.rank, client.world_size) for client in everybody] == [(0, 3), (1, 3), (2, 3)]
    assert clients[0].calls > before


def test_a_rank_that_is_lost_and_one_that_takes_its_place(job, newcomers):
    clients = job(3, **CONTINUE)
    assert total(clients) == [111] * 3
    clients.pop(1).shutdown()
    assert total(clients) == [101] * 2
    newcomer = newcomers()
    admit_until(clients, lambda found: found == [True, True])
    newcomer.thread.join()
    assert newcomer.client is not None
    assert newcomer.client.admit()
    everybody = [*clients, newcomer.client]
    assert total(everybody) == total(everybody, "named") == [1101] * 3
    assert newcomer.client.present == clients[0].present == (0, 2, 3)


def test_a_newcomer_that_gives_up_costs_nothing(job, newcomers):
    clients = job(2, **CONTINUE)
    each(clients, lambda client: client.admit())
    newcomers(timeout="1s").thread.join()  # nobody calls admit()
    newcomer = newcomers()
    admit_until(clients, lambda found: found == [True, True])
    newcomer.thread.join()
    assert newcomer.client is not None
    assert newcomer.client.admit()
    everybody = [*clients, newcomer.client]
    assert total(everybody) == [11 + 10.0**newcomer.client.rank] * 3


def test_nobody_is_there_to_let_a_rank_in(newcomers):
    newcomer = newcomers(timeout="1s")
    newcomer.thread.join()
    assert isinstance(newcomer.error, ReductionTimeout)
    assert "client.admit()" in str(newcomer.error)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"on_rank_lost": "error"}, "REDUCTION_ON_RANK_LOST=continue"),
        ({"servers": ()}, "REDUCTION_SERVERS"),
        ({"hierarchy": "auto"}, "REDUCTION_HIERARCHY"),
    ],
)
def test_what_does_not_go_with_joining(newcomers, settings, said):
    newcomer = newcomers(**settings)
    newcomer.thread.join()
    assert isinstance(newcomer.error, ConfigError)
    assert said in str(newcomer.error)


def test_settings_that_differ_are_an_error_of_who_joins_alone(job, newcomers):
    clients = job(2, chunk_bytes="64KiB", **CONTINUE)
    each(clients, lambda client: client.admit())
    time.sleep(0.5)  # the lobby is open
    other = newcomers(chunk_bytes="64KiB", wire_dtype="bf16")
    begun = time.monotonic()
    while other.thread.is_alive():
        assert each(clients, lambda client: client.admit()) == [False] * 2
    within_s(5.0, begun)
    assert isinstance(other.error, MismatchError)
    assert "REDUCTION_WIRE_DTYPE" in str(other.error)
    assert total(clients) == [11, 11]
    newcomer = newcomers(chunk_bytes="64KiB", generation=3)  # as of a rank that was restarted
    admit_until(clients, lambda found: found == [True, True])
    newcomer.thread.join()
    assert newcomer.client is not None


def test_a_callback_that_fails_costs_nothing(job, caplog):
    def fail(change):
        raise ValueError(change)

    clients = job(3, **CONTINUE)
    clients[0].on_membership(fail)
    assert total(clients) == [111] * 3
    clients.pop(1).shutdown()
    assert total(clients) == [101] * 2
    assert "a callback of on_membership() failed" in caplog.text


def test_ranks_join_between_calls(job):
    clients = job(2, **CONTINUE)
    work = clients[0].all_reduce(ones())
    with pytest.raises(ConfigError, match=r"wait for all calls before admit\(\)"):
        clients[0].admit()
    clients[1].all_reduce(ones()).wait(30)
    work.wait(30)
    work = clients[0].all_reduce(ones(), name="named")
    with pytest.raises(ConfigError, match=r"wait for all calls before admit\(\)"):
        clients[0].admit()
    clients[1].all_reduce(ones(), name="named").wait(30)
    work.wait(30)
    clients[0].refuse_newcomers("buckets differ")
    with pytest.raises(ConfigError, match="buckets differ"):
        clients[0].admit()
    (client,) = job(1, job="other")
    with pytest.raises(ConfigError, match="REDUCTION_ON_RANK_LOST=continue"):
        client.admit()


@pytest.mark.extended("test_a_rank_that_is_lost_and_one_that_takes_its_place")
def test_the_example_trains_alike_at_old_ranks_and_new_ones(servers):
    arguments = ["examples/elastic_digits.py", "--steps", "120", "--pause", "0.01"]
    settings = {"REDUCTION_JOB": "digits", "REDUCTION_TIMEOUT": "60s"}
    started = environments(2, servers, **settings)
    newcomer = {k: v for k, v in started[0].items() if k not in {"RANK", "WORLD_SIZE"}}
    with ranks([*started, {**newcomer, "REDUCTION_JOIN": "1"}], *arguments) as running:
        ends = [line for text in running.outputs() for line in text.splitlines() if "ends" in line]
    assert len({line.split("weights")[1] for line in ends}) == 1
    assert len(ends) == 3
