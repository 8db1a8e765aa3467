"""Results of a reducer that a rank hosts are read straight into the caller's buffer."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from reducer.errors import ReductionTimeout
from reducer.wire.constants import HEADER_BYTES
from tests.transport.by_hand import Reducer, result
from tests.transport.scripted import CHUNK, HOST, MIB, M, ramp
from tests.waits import eventually
from worker_client.client.compose import Composer
from worker_client.protocol.spec import JobSpec
from worker_client.runtime import implementation

pytest.importorskip("worker_client.runtime._loop", reason="needs the compiled loop")
HOSTED = {0: 1}  # rank 1 hosts the only reducer


@pytest.fixture
def reducer():
    made = Reducer()
    yield made
    made.close()


@pytest.fixture(params=[HOSTED, {}], ids=["hosted", "of a pool"])
def client(reducer, request):
    address = f"{HOST}:{reducer.listener.getsockname()[1]}"
    spec = JobSpec("job", 0, 0, 2, (address,), MIB, CHUNK, hosts=request.param)
    with ThreadPoolExecutor(1) as thread:
        composer = Composer(implementation.select("compiled"), 0.5, 5.0)
        made = thread.submit(composer.client, spec)
        reducer.welcome()
        client = made.result(5)
    with client:
        yield client


def half_read(reducer, client, data):
    """Begin an all-reduce, and send half of its only result; return what is left of that."""
    work = client.all_reduce(data, op="max")
    header, _ = reducer.hear(M.CONTRIBUTION)
    said = result(header, b"\xff" * CHUNK)
    reducer.peer.sendall(said[: -CHUNK // 2])
    return work, said[-CHUNK // 2 :]


@pytest.mark.parametrize("client", [HOSTED], indirect=True)
def test_a_result_is_in_its_place_before_it_is_whole(reducer, client):
    data = ramp(CHUNK)
    work, rest = half_read(reducer, client, data)
    eventually(lambda: not (data[: CHUNK // 2] != 255).any(), 2.0)
    assert (data[CHUNK // 2 :] == ramp(CHUNK)[CHUNK // 2 :]).all()
    reducer.peer.sendall(rest)
    assert (work.wait(5) == 255).all()


@pytest.mark.parametrize("client", [{}], indirect=True)
def test_what_another_reducer_may_need_is_left(reducer, client):
    data = ramp(CHUNK)
    work, rest = half_read(reducer, client, data)
    time.sleep(0.3)
    assert (data == ramp(CHUNK)).all()
    reducer.peer.sendall(rest)
    assert (work.wait(5) == 255).all()


def test_nothing_is_read_into_a_buffer_that_the_caller_has_again(reducer, client):
    data = ramp(CHUNK)
    work, rest = half_read(reducer, client, data)
    with pytest.raises(ReductionTimeout):
        work.wait()
    data[:] = 7
    reducer.peer.sendall(rest)
    again = ramp(3 * CHUNK)
    work = client.all_reduce(again, op="max")
    for header, payload in [reducer.hear(M.CONTRIBUTION) for _ in range(3)]:
        reducer.peer.sendall(result(header, (payload + np.uint8(1)).tobytes()))
    assert (work.wait(5) == ramp(3 * CHUNK) + np.uint8(1)).all()
    assert (data == 7).all()


@pytest.mark.parametrize("at", [1, HEADER_BYTES + 20, 1000, CHUNK])
def test_any_cut_is_the_same(reducer, client, at):
    for _ in range(3):
        data = ramp(2 * CHUNK + 64)
        work = client.all_reduce(data, op="max")
        heard = [reducer.hear(M.CONTRIBUTION) for _ in range(3)]
        said = b"".join(
            result(header, (payload + np.uint8(1)).tobytes()) for header, payload in reversed(heard)
        )
        for part in (said[:at], said[at:]):
            reducer.peer.sendall(part)
            time.sleep(0.02)
        assert (work.wait(5) == ramp(2 * CHUNK + 64) + np.uint8(1)).all()
