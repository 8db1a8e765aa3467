"""Ranks of a node reduce among themselves first: real groups, real reducers, several nodes."""

import gc
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest

from harness.oracle import through
from reducer.errors import (
    ConfigError,
    MismatchError,
    RankLostError,
    ReductionError,
    ReductionTimeout,
)
from tests import inside
from tests.conftest import reducer_here
from tests.integration.calls import ORACLE, Board, check_bits, errors_of, ones, reduced
from tests.waits import eventually, within_s
from torture.guarantee_oracle import FLOATS, TYPES, Shape
from torture.guarantee_plan import Call
from worker_client.client import compose
from worker_client.communicators.placement import arrange
from worker_client.config import WorkerConfig
from worker_client.protocol.spec import Heartbeats, JobSpec

numbers = itertools.count()


@contextmanager
def ranks_on(nodes, local, servers, wire_dtype="none", *, takes_devices=False, **spec):
    """All ranks of a job as clients in this process."""
    keys = [str(rank // local) for rank in range(nodes * local)]
    number, board = next(numbers), Board()

    def join(rank):
        place = arrange(keys, rank)
        job = f"nodes-{number}-{place.local_rank}"
        patient = Heartbeats(peer_timeout_s=4.0)  # all ranks are threads of this one process
        between = JobSpec(
            job,
            0,
            place.node,
            nodes,
            tuple(servers),
            0,
            heartbeats=patient,
            process=str(rank),
            **spec,
        )
        node = compose.Node(place, board.around(place, takes_devices=takes_devices))
        return compose.client(WorkerConfig(timeout=20.0, wire_dtype=wire_dtype), between, node=node)

    with ExitStack() as stack, ThreadPoolExecutor(nodes * local) as pool:
        yield [stack.enter_context(client) for client in list(pool.map(join, range(nodes * local)))]


@pytest.fixture(scope="module")
def six(pool):
    """Two nodes of three ranks each."""
    with ranks_on(2, 3, pool) as clients:
        yield clients


def check(six, dtype="float32", op="mean", count=100):
    check_bits(six, dtype, op, count, nodes=2)


failures = partial(errors_of, within_s=20.0)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_rank_has_the_bits_of_the_stated_order(six, dtype, op):
    if op == "mean" and dtype not in FLOATS:
        for client in six:
            with pytest.raises(ConfigError, match="the mean of"):
                client.all_reduce(np.zeros(3, dtype), op)
        return
    for count in (0, 1, 2, 3, 1000, 10_007):
        check(six, dtype, op, count)


def test_16_bits_on_the_wire_depend_on_the_tensor_not_on_its_parts(servers):
    with ranks_on(2, 2, servers, wire_dtype="fp16") as clients:
        for count, mean in ((4096, 1.0), (4095, 1 + 2.0**-12)):
            rows = [np.full(count, 1 + 2.0**-12, np.float32) for _ in clients]
            assert all(set(result) == {mean} for result in reduced(clients, rows))
        rows = [np.full(4096, 40_000, np.float32) for _ in clients]  # of which two are too many
        assert all(set(result) == {40_000} for result in reduced(clients, rows))


def test_a_node_sends_each_buffer_once():
    with reducer_here() as server, ranks_on(2, 3, [server.address]) as clients:
        check(clients, count=30_000)
        nbytes = 4 * 30_000
        eventually(lambda: server.counters.bytes_in >= 2 * nbytes)
        assert server.counters.bytes_in == pytest.approx(2 * nbytes, rel=0.02)
        assert [client.bytes_reduced for client in clients] == [nbytes] * 6


@pytest.mark.parametrize("wire_dtype", ["none", "bf16"])
def test_a_weighted_mean(servers, wire_dtype):
    with ranks_on(2, 2, servers, wire_dtype=wire_dtype) as clients:
        how = {"nodes": 2, "wire_dtype": wire_dtype.replace("none", "")}
        check_bits(clients, "float32", "mean", 5000, weights=(1.0, 0.0, 2.5, 4.0), **how)
        some = [client.all_reduce(np.ones(9), weight=client.rank or None) for client in clients]
        assert all(isinstance(error, MismatchError) for error in errors_of(some))
        if wire_dtype != "none":
            some = [c.all_reduce(ones(5000), exact=c.rank % 2 == 0) for c in clients]
            assert {error.field for error in errors_of(some)} == {"exact"}
        check(clients, "float64")


def test_what_a_cast_takes_away_from_a_node_is_added_to_its_next_sum(servers):
    with ranks_on(2, 2, servers, wire_dtype="bf16") as clients:
        count, calls = 8192, 64
        values = np.random.default_rng(0).standard_normal((4, count), np.float32)
        residuals = [np.zeros(count, np.float32) for _ in clients]
        total = np.zeros(count)
        for _ in range(calls):
            (result, *_) = reduced(clients, [v.copy() for v in values], "sum", residual=residuals)
            total += result
        want = np.sum(values, axis=0, dtype=np.float64)
        step = np.abs(want).max() * 2**-8  # of one rounding; the result's own is not kept
        assert np.abs(total / calls - want).max() <= 1.2 * step
        for node in (residuals[:2], residuals[2:]):
            kept = np.stack(node) != 0
            assert kept.any(axis=1).all()
            assert kept.sum(axis=0).max() == 1, "a rank keeps what its own part has lost"


def test_what_fails_between_nodes_fails_everywhere_and_the_next_one_works(six):
    works = [client.all_reduce(np.zeros(12 if client.rank < 3 else 24)) for client in six]
    for error in failures(works):
        assert isinstance(error, MismatchError)
        assert (error.rank, error.other_rank) in {(1, 4), (4, 1)}  # the first parts are alike
        assert "between nodes" in str(error)
    works = [client.all_reduce(np.zeros(6), timeout="500ms") for client in six[:3]]
    for error in failures(works):
        assert isinstance(error, ReductionTimeout)
        assert error.missing == (3,)  # of the first part's job; the other two miss 4 and 5
    failures([client.all_reduce(np.zeros(6), timeout="500ms") for client in six[3:]])
    check(six)


def test_ranks_of_a_node_that_disagree_are_named_and_the_next_call_works(six):
    start = time.monotonic()
    works = [
        client.all_reduce(np.zeros(4, np.float64 if client.rank == 5 else np.float32))
        for client in six
    ]
    far, near = failures(works[:3]), failures(works[3:])
    within_s(5.0, start)
    for error in near:
        assert isinstance(error, MismatchError)
        assert (error.field, error.rank, error.other_rank) == ("total_bytes", 3, 5)
    for error in far:
        assert isinstance(error, MismatchError)
        assert error.field == "call"
        assert "within a node: ranks disagree" in str(error)
    check(six)


def test_a_rank_that_is_late_is_named_and_none_of_its_node_goes_on(servers):
    with ranks_on(2, 3, servers) as clients:
        late = [client.all_reduce(ones(), timeout="500ms") for client in clients[:2]]
        for error in errors_of(late):
            assert isinstance(error, ReductionTimeout)
            assert error.missing == (2,)
        for client in clients[:3]:
            with pytest.raises(ReductionTimeout):
                client.all_reduce(ones()).wait(10)


def leave(servers):
    with ranks_on(2, 2, servers) as clients:
        works = [clients[0].all_reduce(ones())]
        clients[1].shutdown()
        for error in errors_of(works):
            assert isinstance(error, RankLostError)
            assert error.rank == 1
            assert "of this node, has left" in str(error)


def test_a_rank_that_leaves_is_named_and_nobody_waits_for_what_gloo_has_begun(servers):
    start = time.monotonic()
    leave(servers)
    gc.collect()  # with the process groups, whose own timeout is later
    within_s(15.0, start)


def elastic(servers):
    """Three nodes, which make their first call; the last rank of all swaps, and then is gone."""
    return ranks_on(3, 2, servers, "bf16", elastic=True)


def gone_when(done):
    """Stand for `_send` of a rank that ends when something is done elsewhere."""

    def send(call):
        del call
        eventually(done)
        raise ReductionError("gone")

    return send


def lose_between_rails(clients, monkeypatch):
    """The first parts have a sum of all nodes, and the second ones cannot have one."""
    rails = [inside.rail(client) for client in clients]

    def had():
        return all(rails[rank].contributors == (0, 1, 2) for rank in (0, 2))

    monkeypatch.setattr(inside.communicator(clients[5]), "_send", gone_when(had))


def test_parts_that_have_a_lost_node_are_made_again(servers, monkeypatch):
    with elastic(servers) as clients:
        lose_between_rails(clients, monkeypatch)
        rng = np.random.default_rng(0)
        values = [rng.standard_normal(20_000, np.float32) for _ in clients]
        residuals = [np.zeros_like(value) for value in values]
        works = [
            client.all_reduce(value.copy(), "sum", residual=residual)
            for client, value, residual in zip(clients, values, residuals, strict=True)
        ]
        nodes = [values[0] + values[1], values[2] + values[3]]
        sent = [through(node, "bf16") for node in nodes]
        right = through(sent[0] + sent[1], "bf16")
        for work in works[:4]:
            assert work.wait(30).tobytes() == right.tobytes()
        for at, node in enumerate(nodes):
            kept = residuals[2 * at] + residuals[2 * at + 1]
            assert kept.tobytes() == (node - sent[at]).tobytes(), "it was added twice"
        assert {client.present for client in clients[:4]} == {(0, 1, 2, 3)}
        for error in errors_of(works[4:]):
            assert isinstance(error, ReductionError)
        check(clients[:4])


def test_where_a_part_cannot_be_made_again_no_rank_goes_on(servers, monkeypatch):
    """For some it may be over: what they call next must not meet what the others make again."""
    with elastic(servers) as clients:
        lose_between_rails(clients, monkeypatch)
        first, third = (inside.communicator(clients[rank]) for rank in (0, 2))
        works = []

        def too_late(send, call):
            if call.again:
                call.asked.deadline = time.monotonic()
            send(call)

        def later(send, call):
            if call.again:
                eventually(works[0].done)
            send(call)

        monkeypatch.setattr(first, "_send", partial(too_late, inside.send(first)))
        monkeypatch.setattr(third, "_send", partial(later, inside.send(third)))
        works += [client.all_reduce(ones(), "sum") for client in clients]
        for error in errors_of(works[:4], within_s=20.0):
            assert isinstance(error, ReductionTimeout)
        for client in clients[:4]:
            with pytest.raises(ReductionTimeout):
                client.all_reduce(ones())


@pytest.fixture
def devices(monkeypatch):
    """Torch's tensors are on a slow device."""
    pytest.importorskip("torch", reason="needs torch")
    from tests.worker_client.slow_device import Devices  # noqa: PLC0415 (it imports torch)

    made = Devices()
    monkeypatch.setattr("worker_client.client.client.is_on_device", is_tensor)
    monkeypatch.setattr("worker_client.staging.device.open_device", made.open)
    monkeypatch.setattr("worker_client.staging.split_call.PIECE_BYTES", 4096)
    yield made
    for one in made.opened:
        one.close()


def is_tensor(data):
    return type(data).__name__ == "Tensor"


@pytest.mark.parametrize("wire_dtype", ["none", "int8"])
def test_tensors_on_devices_follow_what_fills_them(servers, devices, wire_dtype):
    import torch  # noqa: PLC0415

    shape = Shape(((0, 1), (2, 3)), wire_dtype.replace("none", ""))
    rows, columns = 100, 71
    with ranks_on(2, 2, servers, wire_dtype, takes_devices=True) as clients:
        reduced(clients, [torch.ones(9) for _ in clients])  # each has a device from now on
        for step, (dtype, turned) in enumerate([("float32", 0), ("bfloat16", 0), ("float32", 1)]):
            call = Call((0, step, 0), None, dtype, "mean", rows * columns)
            tensors = []
            for rank, device in enumerate(devices.opened):
                values = torch.from_numpy(ORACLE.contribution(call, rank))
                values = values.view(getattr(torch, dtype)).view(rows, columns)
                if turned:
                    tensors.append(values.t().contiguous().t())
                else:
                    tensors.append(torch.zeros_like(values))
                    device.compute.do(partial(fill, tensors[-1], values))
            for tensor in reduced(clients, tensors):
                got = tensor.contiguous().view(torch.uint8).numpy()
                assert got.tobytes() == ORACLE.result(call, shape).tobytes(), call
        nbytes = 4 * 9 + (4 + 2 + 4) * rows * columns
        assert [client.bytes_reduced for client in clients] == [nbytes] * 4
        assert all(device.made("to_host") for device in devices.opened)


def fill(tensor, values):
    time.sleep(0.05)
    tensor.copy_(values)
