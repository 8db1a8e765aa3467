"""Named tensors over real reducers: any order, packed, exact; and what if one is missing."""

import logging
import random
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from reducer.errors import (
    ConfigError,
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReductionTimeout,
)
from reducer.wire.constants import PLACES
from tests.conftest import joined, local_pool
from tests.waits import eventually
from tests.worker_client.waits import at_all
from worker_client.fusion import tensor_queue
from worker_client.fusion.fusion import Fusion
from worker_client.protocol import operation
from worker_client.staging.buffer_pool import BufferPool

KINDS = [
    (np.float32, "sum"),
    (np.float32, "mean"),
    (np.float16, "sum"),
    (np.int64, "max"),
    (np.uint8, "min"),
    (np.float64, "product"),
]


def values(number, rank):
    dtype, _ = KINDS[number % len(KINDS)]
    size = np.random.default_rng(number).integers(0, 700) + 60_000 * (number % 17 == 3)
    return np.random.default_rng([number, rank]).integers(1, 5, size).astype(dtype)


def expected(number, world_size):
    dtype, op = KINDS[number % len(KINDS)]
    inputs = np.stack([values(number, rank) for rank in range(world_size)])
    if op == "mean":
        return (inputs.sum(0, dtype=np.float32) * np.float32(1 / world_size)).astype(dtype)
    how = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}[op]
    return how.reduce(inputs.astype(np.float64)).astype(dtype)


def check_sum(clients, value):
    """Let every rank submit a tensor under one name."""
    tensors = [np.full(2, value) for _ in clients]
    works = [c.all_reduce(t, "sum", name="n") for c, t in zip(clients, tensors, strict=True)]
    for work in works:
        work.wait(5)
    assert all((tensor == len(clients) * value).all() for tensor in tensors)


@pytest.mark.extended_cases("4-8KiB", "4-0")
@pytest.mark.parametrize("threshold", ["64MiB", "8KiB", "0"])
@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_may_submit_in_any_order(job, threshold, world_size, monkeypatch):
    numbers = range(120)

    def train(client):
        rng = random.Random(client.rank)
        for _ in range(3):
            order = rng.sample(numbers, len(numbers))
            tensors = {number: values(number, client.rank) for number in order}
            works = {
                number: client.all_reduce(tensors[number], KINDS[number % 6][1], name=f"t{number}")
                for number in order
            }
            for number in rng.sample(numbers, len(numbers)):
                assert works[number].wait(30) is tensors[number]
                np.testing.assert_array_equal(tensors[number], expected(number, world_size))

    opened, open_ = [], Fusion.open
    monkeypatch.setattr(Fusion, "open", lambda fusion: (open_(fusion), opened.append(fusion)))
    at_all(job(world_size, fusion_threshold=threshold), train)
    sessions = [fusion.communicator.session for fusion in opened]
    sent = [session.calls.numbering.end // PLACES + 1 for session in sessions]
    assert len(sent) == world_size
    assert len(set(sent)) == 1
    per_step = {"64MiB": 100, "8KiB": 200, "0": 1000}[threshold]
    assert sent[0] < 3 * per_step
    if threshold == "0":
        assert sent[0] >= 3 * len(numbers)


def test_nobody_needs_to_wait_for_a_flush(job):
    clients = job(2, cycle_time="5ms")
    tensors = [np.ones(10, np.float32) for _ in clients]
    works = [c.all_reduce(t, "sum", name="x") for c, t in zip(clients, tensors, strict=True)]
    eventually(lambda: all(work.done() for work in works))
    assert all((tensor == 2).all() for tensor in tensors)


def test_who_waits_need_not_wait_for_the_cycle(job):
    def reduce(client):
        client.all_reduce(np.ones(1), name="first").wait(100)
        begin = time.monotonic()
        client.all_reduce(np.ones(1), name="x").wait(100)
        return time.monotonic() - begin

    assert max(at_all(job(2, cycle_time="30s"), reduce)) < 15


def test_strided_arrays_and_calls_without_a_name(job):
    def reduce(client):
        grid = np.zeros((6, 4), np.float32)
        named = client.all_reduce(grid[:, ::2], "sum", name=f"never the same {client.rank}"[:5])
        grid2 = np.full((6, 4), client.rank + 1.0, np.float32)
        plain = [client.all_reduce(np.ones(3, np.float32), "sum") for _ in range(5)]
        column = client.all_reduce(grid2[:, 1], "sum", name="column")
        for work in plain:
            assert (work.wait(20) == 2).all()
        named.wait(20)
        column.wait(20)
        assert (grid2[:, 1] == 3).all()
        assert (grid2[:, 0] == client.rank + 1).all()
        assert client.bytes_reduced == 4 * (12 + 5 * 3 + 6)

    at_all(job(2), reduce)


def test_a_call_that_one_rank_is_refused_fails_at_the_others_and_the_next_is_right(job):
    clients = job(3)
    wrong = [{"op": "nonsense"}, {"data": np.zeros(2, complex)}, {"weight": 2.0}]
    for turn, what in enumerate(wrong):
        data = what.pop("data", np.zeros(2))
        with pytest.raises(ConfigError):
            clients[1].all_reduce(data, what.pop("op", "sum"), name="n", **what)
        works = [clients[at].all_reduce(np.ones(2), "sum", name="n") for at in (0, 2)]
        for work in works:
            with pytest.raises(
                MismatchError, match=r"rank 1 takes no part .*ConfigError"
            ) as caught:
                work.wait(5)
            assert (caught.value.name, caught.value.rank) == ("n", 1)
        check_sum(clients, turn)


def test_a_call_that_was_refused_before_others_made_it(job):
    clients = job(2)
    for _ in range(3):
        clients[0].decline(ValueError("no data"), name="n")
    for _ in range(3):
        with pytest.raises(MismatchError, match=r"rank 0 takes no part .*ValueError: no data"):
            clients[1].all_reduce(np.ones(2), "sum", name="n").wait(5)
    check_sum(clients, 1.0)


def test_ranks_that_disagree_are_named_and_the_rest_is_reduced(job):
    def reduce(client):
        odd = client.all_reduce(np.ones(4 + client.rank, np.float32), name="odd")
        fine = client.all_reduce(np.ones(4, np.float32), "sum", name="fine")
        assert (fine.wait(20) == 2).all()
        with pytest.raises(MismatchError) as caught:
            odd.wait(20)
        again = client.all_reduce(np.ones(4, np.float32), "sum", name="odd")
        assert (again.wait(20) == 2).all()
        return caught.value

    for error in at_all(job(2), reduce):
        assert (error.field, error.rank, error.other_rank) == ("total_bytes", 0, 1)
        assert (error.expected, error.got, error.name) == (16, 20, "odd")


@pytest.mark.extended_cases("nothing")
@pytest.mark.parametrize("busy", [False, True], ids=["nothing", "others"])
def test_a_missing_tensor_is_named_and_fails_at_its_deadline(job, busy, monkeypatch, caplog):
    for module in (operation, tensor_queue):
        monkeypatch.setattr(module, "STRAGGLER_S", 0.3)
    caplog.set_level(logging.WARNING)
    clients = job(3)
    if busy:  # the late rank has something, but not what the others have
        late = clients[1].all_reduce(np.ones(2), name="elsewhere", timeout=2.5)
    begin = time.monotonic()
    works = [clients[rank].all_reduce(np.ones(8), name="x", timeout=1.5) for rank in (0, 2)]
    for work in works:
        with pytest.raises(
            ReductionTimeout, match=r"'x'.*not submitted by rank (0, )?1(, 2)? within"
        ) as caught:
            work.wait(20)
        assert 1 in caught.value.missing, "and whoever has given it up a moment before"
        assert caught.value.name == "x"
    assert 1.5 <= time.monotonic() - begin < 8
    assert any(
        "all-reduce 'x' (64 bytes of FLOAT64): not submitted by rank 1, " in message
        for message in caplog.messages
    )
    if busy:
        with pytest.raises(ReductionTimeout, match=r"'elsewhere'.*not submitted by rank 0, 2"):
            late.wait(20)

    def go_on(client):
        if client.rank == 1:  # it makes the call that it owes: too late
            with pytest.raises(ReductionTimeout, match=r"rank [02] waits no longer") as caught:
                client.all_reduce(np.ones(8), "sum", name="x").wait(20)
            assert 1 in caught.value.missing
        return client.all_reduce(np.ones(8), "sum", name="x").wait(20)[0]

    assert at_all(clients, go_on) == [3.0] * 3


def test_a_late_rank_costs_nothing_but_time(job):
    clients = job(2)
    early = [clients[0].all_reduce(np.ones(4), "sum", name=f"t{at}") for at in range(50)]
    time.sleep(0.5)  # it waits in a round by now
    short = clients[0].all_reduce(np.ones(4), name="short", timeout=0.1)
    with pytest.raises(ReductionTimeout, match="'short'"):
        short.wait(20)
    assert not any(work.done() for work in early)
    for at in reversed(range(50)):
        clients[1].all_reduce(np.ones(4), "sum", name=f"t{at}")
    assert all((work.wait(20) == 2).all() for work in early)


def test_a_rank_that_dies_is_named(job):
    clients = job(3)
    at_all(clients, lambda client: client.all_reduce(np.ones(4), name="x").wait(20))
    works = [clients[rank].all_reduce(np.ones(4), name="x") for rank in (0, 1)]
    clients[2].shutdown()
    for work in works:
        with pytest.raises(RankLostError) as caught:
            work.wait(20)
        assert (caught.value.rank, caught.value.name) == (2, "x")
    with pytest.raises(RankLostError):
        clients[0].all_reduce(np.ones(4), name="y").wait(20)


def test_the_others_go_on_without_a_lost_rank(job):
    clients = job(3, on_rank_lost="continue")
    at_all(clients, lambda client: client.all_reduce(np.ones(4), name="x").wait(30))
    works = [clients[rank].all_reduce(np.ones(4), "sum", name="x") for rank in (0, 1)]
    clients[2].shutdown()
    assert all((work.wait(30) == 2).all() for work in works)


def test_what_is_in_progress_ends_with_the_client(job):
    one, _ = job(2)
    works = [one.all_reduce(np.ones(4), name=f"t{at}") for at in range(3)]
    one.shutdown()
    one.shutdown()
    for work in works:
        with pytest.raises(LocalProtocolError):
            work.wait(20)
    with pytest.raises(LocalProtocolError):
        one.all_reduce(np.ones(4), name="x")


def test_a_callback_may_submit_and_shut_down_but_not_wait(job):
    said, took = [], []

    def train(client):
        def again(_):
            work = client.all_reduce(np.ones(2), "sum", name="again")
            try:
                work.wait(5)
            except LocalProtocolError as error:
                said.append(error)
            work.future().add_done_callback(leave)

        def leave(_):
            begin = time.monotonic()
            client.shutdown()
            took.append(time.monotonic() - begin)

        client.all_reduce(np.ones(2), name="first").future().add_done_callback(again)

    at_all(job(2), train)
    eventually(lambda: len(took) == 2)
    assert len(said) == 2
    assert max(took) < 4


def test_a_thread_that_cannot_be_started_is_started_later(job, monkeypatch):
    (client,) = job(1)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            client.all_reduce(np.ones(1), name="x")
    assert client.all_reduce(np.ones(1), name="x").wait(20) == 1


def test_a_reducer_that_is_lost_before_the_first_name_is_not_waited_for():
    with local_pool(1) as alive, ExitStack() as stack:
        with local_pool(1) as mortal:
            clients = stack.enter_context(joined(2, servers=[*alive, *mortal], job="lost"))
            at_all(clients, lambda client: client.all_reduce(np.ones(9)).wait(20))
        at_all(clients, lambda client: client.all_reduce(np.ones(9)).wait(20))
        sums = at_all(clients, lambda c: c.all_reduce(np.ones(2), "sum", name="x").wait(20)[0])
        assert sums == [2.0, 2.0]


def test_a_rank_that_is_lost_before_the_first_name_is_not_waited_for(job):
    clients = job(3, on_rank_lost="continue")
    at_all(clients, lambda client: client.all_reduce(np.ones(4)).wait(30))
    clients[2].shutdown()
    left = clients[:2]
    at_all(left, lambda client: client.all_reduce(np.ones(4)).wait(30))
    assert at_all(left, lambda c: c.all_reduce(np.ones(2), "sum", name="x").wait(30)[0]) == [2, 2]


def test_a_callback_of_what_has_failed_may_not_wait_either(job):
    one, _ = job(2)
    other = one.all_reduce(np.ones(2), name="other")
    said = []

    def wait(_):
        with pytest.raises(LocalProtocolError) as caught:
            other.wait(5)
        said.append(caught.value)

    one.all_reduce(np.ones(2), name="late", timeout=0.2).future().add_done_callback(wait)
    eventually(lambda: said)


def test_what_fails_between_a_round_and_its_all_reduce_leaves_nobody_waiting(job, monkeypatch):
    (client,) = job(1)
    client.all_reduce(np.ones(2), name="x").wait(20)

    def fail(pool, nbytes):
        raise MemoryError

    monkeypatch.setattr(BufferPool, "take", fail)
    works = [client.all_reduce(np.ones(2), name=f"t{at}") for at in range(3)]
    for work in works:
        with pytest.raises(LocalProtocolError, match="fusion failed: MemoryError"):
            work.wait(20)
    with pytest.raises(LocalProtocolError, match="fusion failed: MemoryError"):
        client.all_reduce(np.ones(2), name="x")


def test_a_shutdown_while_the_channel_is_made(job, monkeypatch):
    one, _ = job(2)
    open_, begun, made = Fusion.open, [], threading.Event()

    def late(fusion):
        begun.append(fusion)
        made.wait(20)
        open_(fusion)

    monkeypatch.setattr(Fusion, "open", late)
    work = one.all_reduce(np.ones(2), name="x")
    eventually(lambda: begun)
    threading.Timer(0.3, made.set).start()
    one.shutdown()
    with pytest.raises(LocalProtocolError):
        work.wait(5)
    assert begun[0].communicator.closing


def test_deadlines_hold_while_the_channel_is_made(job, monkeypatch):
    one, two = job(2)
    open_, made = Fusion.open, threading.Event()
    monkeypatch.setattr(Fusion, "open", lambda fusion: made.wait(20) and open_(fusion))
    patient = one.all_reduce(np.ones(2), "sum", name="patient", timeout=20)
    for after_s in (0.5, 0.2):
        begin = time.monotonic()
        hasty = one.all_reduce(np.ones(2), name="hasty", timeout=after_s)
        with pytest.raises(ReductionTimeout, match=r"'hasty'.*not submitted by some rank within"):
            hasty.wait(20)
        assert after_s <= time.monotonic() - begin < 10, "not when the channel is made"
    made.set()
    assert (two.all_reduce(np.ones(2), "sum", name="patient").wait(20) == 2).all()
    assert (patient.wait(20) == 2).all()
    with pytest.raises(ReductionTimeout, match="rank 0 waits no longer"):
        two.all_reduce(np.ones(2), name="hasty").wait(20)
