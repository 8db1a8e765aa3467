"""Strangers at a reducer's port, and jobs that break the rules, beside one that keeps them."""

from contextlib import ExitStack, closing, suppress

import pytest

from hostile import company
from hostile.intruder import JOB, TENANTS, WINDOW, Worker
from hostile.zmtp import STRANGERS, dial
from reducer.errors import CapacityError
from reducer.wire.constants import MessageType
from reducer.wire.messages import decode_error
from tests.conftest import joined
from tests.security.conftest import HONEST, SHORT, reduces
from tests.waits import eventually

CHUNK = 1 << 18
OVERHEAD = 192 << 20  # of the process, its heap's unused parts, and what comes between two looks


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_shown_out(reducer, honest, kind):
    before = reducer.files
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(STRANGERS[kind](reducer.address))
        assert reduces(honest)
        # They are still there: it is the reducer that closes them.
        eventually(lambda: reducer.files <= before)
    assert reduces(honest)


def test_idle_connections_cost_nothing_but_themselves(reducer, honest):
    before, resident = reducer.files, reducer.resident
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(dial(reducer.address))
        assert reduces(honest)
        eventually(lambda: reducer.files <= before)
    assert reducer.resident < resident + (32 << 20)


def send(worker, chunk):
    """Contribute a chunk; return whether anybody takes it."""
    try:
        worker.contribute(1, bytes(CHUNK), chunk * CHUNK)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", TENANTS)
def test_another_job_is_served_all_the_same(reducer, honest, kind):
    before = reducer.files
    for _ in range(3):
        with suppress(OSError):  # it was shown out before it was through
            TENANTS[kind](reducer.address)
        assert reduces(honest)
        assert reducer.resident < (256 << 20) + OVERHEAD
    eventually(lambda: reducer.files <= before)


def test_who_has_keys_may_do_no_more():
    with ExitStack() as stack:
        keys = stack.enter_context(company.keys_for("honest", JOB))
        reducer = stack.enter_context(company.reducer(*SHORT, keys=keys))
        shown = keys / "jobs"
        servers = [reducer.address]
        honest = joined(2, servers=servers, keys=str(shown / "honest"), **HONEST)
        clients = stack.enter_context(honest)
        assert reduces(clients)
        before = reducer.files
        for act in TENANTS.values():
            with suppress(OSError):
                act(reducer.address, shown / JOB)
            assert reduces(clients)
            assert reducer.resident < (256 << 20) + OVERHEAD
        eventually(lambda: reducer.files <= before)


def test_greedy_workers_share_what_there_is(reducer, honest):
    with ExitStack() as stack:
        greedy = [
            stack.enter_context(
                closing(Worker(reducer.address, f"greedy {n}", window=WINDOW << n % 8))
            )
            for n in range(100)
        ]
        admitted, limits = [], set()
        for worker in greedy:
            header, body = worker.hear()
            if header.type is MessageType.WELCOME:
                admitted.append(worker)
            else:
                error = decode_error(body)
                assert isinstance(error, CapacityError)
                limits.add(error.limit)
        assert admitted
        assert "memory_limit" in limits <= {"memory_limit", "max_jobs"}
        for chunk in range(256):
            admitted = [worker for worker in admitted if send(worker, chunk)]
            assert reducer.resident < (256 << 20) + OVERHEAD
        assert reduces(honest)
    assert reduces(honest)
