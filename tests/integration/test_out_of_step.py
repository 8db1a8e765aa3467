"""Ranks that are refused a call, interrupted in it, or ask for something else: the next matches."""

import os
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from reducer.errors import ConfigError, MismatchError, RankLostError, StaleGenerationError
from tests.conftest import joined, local_pool
from tests.integration.calls import errors_of
from tests.interrupts import BoomError, boom_at
from tests.waits import within_s
from worker_client.client.bootstrap import connect

pytestmark = pytest.mark.usefixtures("impl")


@pytest.fixture(scope="module")
def three(impl):
    with local_pool(2) as servers, joined(3, servers=servers, timeout="5s") as clients:
        yield clients


def check(clients, calls=20):
    for call in range(calls):
        works = [
            client.all_reduce(np.full(1000, 10.0 * call + client.rank), "sum") for client in clients
        ]
        for work in works:
            assert (work.wait(5) == sum(10.0 * call + client.rank for client in clients)).all()


@pytest.mark.parametrize(
    ("data", "arguments", "says"),
    [
        (np.ones(4, np.int32), {"op": "mean"}, "op='sum'"),
        (np.ones(4, np.complex64), {}, "complex64"),
        (np.ones(4), {"op": "median"}, "median"),
        (np.ones(4), {"timeout": "soon"}, "timeout"),
        (np.ones(4), {"weight": -1.0}, "weight"),
        (np.ones(4), {"residual": np.zeros(4)}, "residual"),
        ("no array", {}, "NumPy array"),
        ([1.0, 2.0], {}, "NumPy array"),
    ],
)
def test_a_call_that_one_rank_is_refused(three, data, arguments, says):
    with pytest.raises(ConfigError, match=says) as refused:
        three[1].all_reduce(data, **arguments)
    begun = time.monotonic()
    works = [three[rank].all_reduce(np.ones(4), "sum") for rank in (0, 2)]
    for error in errors_of(works, within_s=4.0):
        assert isinstance(error, MismatchError)
        assert (error.field, error.rank) == ("call", 1)
        assert str(refused.value)[:40] in str(error)
    within_s(4.0, begun, "not when the calls time out")
    check(three)


def test_calls_in_flight_around_a_refused_one(three):
    works = [[], [], []]
    for call in range(30):
        for client in three:
            if call == 11 and client.rank == 2:
                client.decline(ValueError("it has no batch left"))
                continue
            data = np.full(100, float(call))
            works[client.rank].append((call, client.all_reduce(data, "sum")))
    for call, work in (one for mine in works for one in mine):
        if call == 11:
            with pytest.raises(MismatchError, match="it has no batch left"):
                work.wait(5)
        else:
            assert (work.wait(5) == 3.0 * call).all()


@pytest.mark.parametrize("field", ["size", "weight", "dtype", "op"])
def test_the_next_call_after_a_mismatch(three, field):
    def odd(client):
        data = np.ones(64 if field == "size" and client.rank == 1 else 32, np.float32)
        data = data.astype(np.float64) if field == "dtype" and client.rank == 1 else data
        op = "max" if field == "op" and client.rank == 1 else "mean"
        return client.all_reduce(
            data, op, weight=2.0 if field == "weight" and client.rank == 1 else None
        )

    for error in errors_of([odd(client) for client in three], within_s=4.0):
        assert isinstance(error, MismatchError)
    check(three)


def test_an_exception_out_of_a_trace_at_any_line_of_a_call(three):
    """Wherever it comes in `all_reduce`: the others hear of it, or it counts at no rank."""
    for line in range(1, 400):
        work, interrupted, before = None, None, three[1].calls
        sys.settrace(boom_at(line, after="all_reduce", never_in="none"))
        try:
            work = three[1].all_reduce(np.full(8, 1.0), "sum")
        except BoomError as error:
            interrupted = traceback.extract_tb(error.__traceback__)[-2].name
        finally:
            sys.settrace(None)
        if three[1].calls == before:  # nothing of it has begun, nor has it called anything
            assert interrupted in {"all_reduce", "__init__", "begin"}
            continue
        others = [three[rank].all_reduce(np.full(8, 1.0), "sum") for rank in (0, 2)]
        if not interrupted:
            assert work is not None
            assert [one.wait(5)[0] for one in (work, *others)] == [3.0] * 3
            break
        for other in others:
            ended = other.future().exception(5)  # or it was on its way in whole
            assert ended is None or "BoomError" in str(ended)
        check(three, 1)
    else:
        pytest.fail("the call has more lines than were tried")


def test_an_exception_at_any_line_of_a_call_with_a_name(three):
    """It is made, or the others hear that it is not; the next call of the name matches."""
    for line in range(1, 200):
        interrupted = False
        array = np.full(8, 1.0)
        sys.settrace(boom_at(line, after="_check_named", never_in="decline"))
        try:
            three[1].all_reduce(array, "sum", name="it")
        except BoomError:
            interrupted = True
        finally:
            sys.settrace(None)
        others = [three[rank].all_reduce(np.full(8, 1.0), "sum", name="it") for rank in (0, 2)]
        for other in others:
            ended = other.future().exception(5)  # or it was accepted already
            assert ended is None or "BoomError" in str(ended)
        while (array == 1.0).all() and ended is None:
            time.sleep(0.001)  # its own handle is lost
        works = [client.all_reduce(np.full(8, 2.0), "sum", name="it") for client in three]
        assert [work.wait(5)[0] for work in works] == [6.0] * 3
        if not interrupted:
            break
    else:
        pytest.fail("the call has more lines than were tried")


# -- who is who -------------------------------------------------------------------------------


def test_a_run_without_a_name_is_told_to_take_one(no_settings):
    with (
        local_pool(1) as servers,
        pytest.raises(ConfigError, match="REDUCTION_JOB=NAME, the same at every rank"),
    ):
        connect(rank=0, world_size=2, servers=servers)


def test_a_job_of_one_needs_no_name(no_settings):
    with local_pool(1) as servers:
        for _ in range(2):
            with connect(rank=0, world_size=1, servers=servers) as client:
                assert client.all_reduce(np.ones(3), "sum").wait(5).tolist() == [1.0, 1.0, 1.0]


def test_the_process_of_an_earlier_run_is_not_met():
    """Its rank 0 was killed before its first call; its rank 1 has yet to call."""
    code = "import sys, worker_client; worker_client.init(); print(flush=True); sys.stdin.read()"
    with local_pool(2) as servers:
        settings = {"REDUCTION_SERVERS": ",".join(servers), "REDUCTION_JOB": "train"}
        identity = {"RANK": "0", "WORLD_SIZE": "2"}
        with (
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, **settings, **identity},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as killed,
            connect(rank=1, world_size=2, servers=servers, job="train", timeout="5s") as old,
        ):
            assert killed.stdout is not None
            killed.stdout.readline()
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            with pytest.raises(StaleGenerationError, match="still has ranks 1 of another run"):
                connect(rank=0, world_size=2, servers=servers, job="train", connect_timeout="3s")
            with pytest.raises(RankLostError):
                old.all_reduce(np.ones(3), "sum").wait(5)
        with joined(2, servers=servers, job="train") as both:
            check(both, 1)


def test_an_earlier_run_that_ends_soon_is_waited_for():
    with local_pool(1) as servers, ThreadPoolExecutor(2) as pool:
        common = {"world_size": 2, "servers": servers, "job": "again"}
        old = connect(rank=1, **common)
        connect(rank=0, **common).shutdown()
        joining = pool.submit(connect, rank=0, **common)
        time.sleep(0.5)
        assert not joining.done()
        old.shutdown()
        with joining.result(5) as zero, connect(rank=1, **common) as one:
            check([zero, one], 1)


@pytest.mark.extended_cases(
    "compiled-wire_dtype-values1",
    "compiled-wire_dtype-values2",
    "compiled-fusion_threshold",
    "compiled-servers-values6",
)
@pytest.mark.parametrize(
    ("variable", "values", "said"),
    [
        ("wire_dtype", ("none", "bf16"), ("none", "bf16")),
        ("wire_dtype", ("bf16", "fp16"), ("bf16", "fp16")),
        ("wire_dtype", ("int8", "bf16"), ("int8", "bf16")),
        ("chunk_bytes", ("256KiB", "64KiB"), ("262144", "65536")),
        ("fusion_threshold", ("2MiB", "1MiB"), ("2097152", "1048576")),
        ("servers", (slice(2), slice(1)), ("2", "1")),
        ("servers", (slice(2), slice(None, None, -1)), ("0", "1")),
    ],
)
def test_ranks_of_other_settings_learn_it_at_once(variable, values, said):
    with local_pool(2) as servers, ThreadPoolExecutor(2) as pool:

        def call(rank):
            value = values[rank]
            settings = {variable: servers[value] if variable == "servers" else value}
            common = {"world_size": 2, "servers": servers, "job": "settings"}
            with (  # noqa: PT012 (it comes when a rank joins, or with its first call)
                pytest.raises(MismatchError) as error,
                connect(rank=rank, **{**common, **settings}) as client,
            ):
                time.sleep(0.3)  # the other has tried by now
                client.all_reduce(np.ones(3), "sum").wait()
            return error.value

        begun = time.monotonic()
        for error in pool.map(call, range(2)):
            assert f"REDUCTION_{variable.upper()}" in str(error)
            assert all(f"says {value}" in str(error) for value in said)
            assert {error.rank, error.other_rank} == {0, 1}
            assert variable != "wire_dtype" or error.field == "REDUCTION_WIRE_DTYPE"
        within_s(5.0, begun)
