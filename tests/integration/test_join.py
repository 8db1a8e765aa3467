"""Ranks leave a job and join it while calls are made in this process; `test_faults` kills some."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from reducer.errors import ConfigError, MismatchError, RankLostError, ReductionTimeout
from tests import inside
from tests.integration.calls import all_reduce, each, ones
from tests.ranks import environments, ranks
from tests.waits import PATIENCE_S, eventually, within_s
from worker_client.client.bootstrap import connect
from worker_client.collectives import broadcast_bytes_from_any

CONTINUE = {"on_rank_lost": "continue", "timeout": "30s"}


@pytest.fixture
def newcomer(servers, request):
    """Have ranks join the test's job: the client in a future, or what it raised."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:

        def join(**arguments):
            common = {"servers": servers, "job": request.node.name[:100], "join": True, **CONTINUE}
            return threads.submit(lambda: stack.enter_context(connect(**{**common, **arguments})))

        yield join


def admit(clients):
    return each(clients, lambda client: client.admit())


def let_in(clients, joining):
    """Make steps until all have let a rank in, at the same one; return all clients."""
    begun = time.monotonic()
    while not any(found := admit(clients)):
        within_s(PATIENCE_S, begun)
        time.sleep(0.02)
    joined = joining.result(30)
    assert found == [True] * len(clients)
    return [*clients, joined]


def total(clients, name=None):
    def call(client):
        given = np.full(1000, 10.0**client.rank)
        client.all_reduce(given, "sum", name=name).wait(30)
        assert len(set(given)) == 1
        return float(given[0])

    return each(clients, call)


def test_calls_of_all_kinds_include_every_rank_that_has_joined(job, newcomer):
    clients = job(2, **CONTINUE)
    assert total(clients, "named") == [11, 11]
    before = clients[0].calls
    told = []
    clients[1].on_membership(told.append)
    everybody = let_in(clients, newcomer())
    everybody[2].on_membership(told.append)
    assert [(change.present, change.joined, change.lost) for change in told] == [
        ((0, 1, 2), (2,), ())
    ] * 2
    assert everybody[2].admit()  # as the others' that has let it in
    assert admit(everybody) == [False] * 3
    assert total(everybody) == total(everybody, "named") == [111] * 3
    assert [(client.rank, client.world_size) for client in everybody] == [(0, 3), (1, 3), (2, 3)]
    assert clients[0].calls > before
    everybody.pop(1).shutdown()
    assert total(everybody) == [101] * 2
    everybody = let_in(everybody, newcomer())
    assert everybody[2].admit()
    assert total(everybody) == total(everybody, "named") == [1101] * 3
    assert everybody[2].present == everybody[0].present == (0, 2, 3)


def test_a_newcomer_that_gives_up_costs_nothing(job, newcomer):
    clients = job(2, **CONTINUE)
    admit(clients)
    with pytest.raises(ReductionTimeout, match=r"client\.admit\(\)"):
        newcomer(timeout="1s").result()  # nobody calls it
    everybody = let_in(clients, newcomer())
    assert everybody[2].admit()
    assert total(everybody) == [11 + 10.0 ** everybody[2].rank] * 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"on_rank_lost": "error"}, "REDUCTION_ON_RANK_LOST=continue"),
        ({"servers": ()}, "REDUCTION_SERVERS"),
        ({"hierarchy": "auto"}, "REDUCTION_HIERARCHY"),
    ],
)
def test_what_does_not_go_with_joining(newcomer, settings, said):
    with pytest.raises(ConfigError, match=said):
        newcomer(**settings).result()


def test_settings_that_differ_are_an_error_of_who_joins_alone(job, newcomer):
    clients = job(2, chunk_bytes="64KiB", **CONTINUE)
    admit(clients)
    time.sleep(0.5)  # the lobby is open
    other = newcomer(chunk_bytes="64KiB", wire_dtype="bf16")
    begun = time.monotonic()
    while not other.done():
        assert admit(clients) == [False] * 2
    within_s(5.0, begun)
    with pytest.raises(MismatchError, match="REDUCTION_WIRE_DTYPE"):
        other.result()
    assert total(clients) == [11, 11]
    let_in(clients, newcomer(chunk_bytes="64KiB", generation=3))  # a restarted rank


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


def test_a_loss_is_logged_with_those_that_go_on_and_a_callback_may_fail(job, caplog):
    def fail(change):
        raise ValueError(change)

    clients = job(3, on_rank_lost="continue")
    clients[0].on_membership(fail)
    assert total(clients) == [111] * 3
    clients.pop(1).shutdown()
    assert total(clients) == [101] * 2
    assert "a callback of on_membership() failed" in caplog.text
    said = [one.getMessage() for one in caplog.records if "going on" in one.msg]
    assert said == [
        "going on without rank 1; ranks that go on: 0, 2 (numbered from 0 on at the reducers)"
    ] * len(clients)


def test_what_was_measured_before_a_loss_still_counts(job):
    clients = job(3, on_rank_lost="continue")
    total(clients, "named")
    total(clients)
    before = clients[0].traffic
    inside.flat(clients[0]).session.waited_for_s.update({1: 0.5, 2: 1.5})
    clients.pop(1).shutdown()
    total(clients)
    inside.flat(clients[0]).session.waited_for_s[1] = 0.25  # of the two that go on, rank 2
    after = clients[0].traffic
    for much, less in zip(after[:2], before[:2], strict=True):
        assert less >= 2 * 8000
        assert much >= less + 8000
    assert after.busy_s > before.busy_s > 0
    assert after.waited_for_s == {1: 0.5, 2: 1.75}
    assert clients[0].summary().durations.count == 3


@pytest.mark.parametrize("roots", [(0, 0), (0, 1), (2, 0)], ids=str)
def test_a_broadcast_comes_from_the_first_that_is_left(job, roots):
    """Whichever root the others ask for, as one of them may know already that rank 0 has gone."""
    clients = job(3, on_rank_lost="continue")
    all_reduce(clients)
    clients.pop(0).shutdown()
    asked = dict(zip(clients, roots, strict=True))

    def ask(client):
        data = np.full(9, client.rank, np.uint8)
        return broadcast_bytes_from_any(client, data, asked[client], "it")

    found = each(clients, ask)
    assert [(list(data), root) for data, root in found] == [([1] * 9, 1)] * 2


def test_calls_that_fail_for_want_of_ranks_keep_nothing(job):
    def failed(client):
        data = ones()
        try:
            client.all_reduce(data).wait(30)
        except RankLostError:
            return weakref.ref(data)
        pytest.fail("it goes on alone")

    clients = job(3, on_rank_lost="continue")
    all_reduce(clients)
    last = clients.pop()
    for client in clients:
        client.shutdown()
    there = [failed(last) for _ in range(5)]
    eventually(lambda: gc.collect() >= 0 and not any(one() is not None for one in there))


@pytest.mark.extended("test_calls_of_all_kinds_include_every_rank_that_has_joined")
def test_the_example_trains_alike_at_old_ranks_and_new_ones(servers):
    arguments = ["examples/elastic_digits.py", "--steps", "120", "--pause", "0.01"]
    settings = {"REDUCTION_JOB": "digits", "REDUCTION_TIMEOUT": "60s"}
    started = environments(2, servers, **settings)
    newcomer = {k: v for k, v in started[0].items() if k not in {"RANK", "WORLD_SIZE"}}
    with ranks([*started, {**newcomer, "REDUCTION_JOIN": "1"}], *arguments) as running:
        ends = [line for text in running.outputs() for line in text.splitlines() if "ends" in line]
    assert len({line.split("weights")[1] for line in ends}) == 1
    assert len(ends) == 3
