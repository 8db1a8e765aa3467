"""Clients that are used in ways they are not made for.

Ranks that are refused a call, interrupted in it, or ask for something else: the next one matches.
"""

import sys
import time
import traceback

import numpy as np
import pytest

import worker_client
from reducer.errors import ConfigError, MismatchError
from tests.conftest import joined, local_pool
from tests.integration.calls import errors_of
from tests.interrupts import BoomError, boom_at
from tests.waits import within_s
from worker_client.client.bootstrap import connect


def test_init_is_idempotent(servers):
    arguments = {"servers": servers, "rank": 0, "world_size": 1, "job": "idempotent"}
    client = worker_client.init(**arguments)
    assert worker_client.init() is client
    assert worker_client.init(**arguments) is client
    with pytest.raises(ConfigError, match="other arguments"):
        worker_client.init(**{**arguments, "job": "another"})
    client.shutdown()
    again = worker_client.init(**arguments)
    assert again is not client
    again.shutdown()


def test_without_reducers_or_a_process_group_it_says_what_to_do(servers, monkeypatch):
    with pytest.raises(ConfigError, match="REDUCTION_SERVERS"):
        connect(rank=0, world_size=2)
    with pytest.raises(ConfigError, match="torchrun"):
        connect(servers="127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"=1 needs init_process_group.* or unset"):
        connect(servers="127.0.0.1:1", embedded=True, rank=0, world_size=2)
    monkeypatch.setenv("REDUCTION_FALLBACK", "process-group")
    with pytest.raises(ConfigError, match="init_process_group"):
        connect(servers=servers, rank=0, world_size=1)


@pytest.mark.parametrize("module", ["worker_client", "worker_client.horovod.torch"])
def test_a_process_that_was_started_with_others_is_no_job_of_one(no_settings, monkeypatch, module):
    for name, text in {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4", "TF_CONFIG": "{}"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match="FLUX_JOB_SIZE='4' of Flux"):
        pytest.importorskip(module, reason="needs torch").init()


@pytest.fixture(scope="module")
def three():
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
        (np.ones(4), {"weight": -1.0}, "weight"),
        (np.ones(4), {"shape": "(2, 2)"}, "give name= as well"),
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
            assert interrupted in {"all_reduce", "_begin", "__init__", "begin"}
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
