"""Clients that have joined scripted reducers."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from tests.transport.guarded import PATIENCE, Post
from tests.transport.scripted import CHUNK, MIB, Reducer
from worker_client.client import compose
from worker_client.config import WorkerConfig
from worker_client.protocol.spec import Heartbeats, JobSpec


@pytest.fixture
def joined():
    """Make a client of rank 0 of 2 that has joined some reducers."""
    with ExitStack() as stack:

        def make(reducers=1, window=MIB, timeout_s=10.0, kind=Reducer, **more):
            pool = [stack.enter_context(closing(kind())) for _ in range(reducers)]
            addresses = tuple(reducer.address for reducer in pool)
            # Who is scripted answers no heartbeats, and this machine may be busy.
            more = {"heartbeats": Heartbeats(peer_timeout_s=60.0), **more}
            spec = JobSpec("job", 0, 0, 2, addresses, window, CHUNK, **more)
            settings = WorkerConfig(timeout=timeout_s, connect_timeout=5.0)
            with ThreadPoolExecutor(1) as thread:
                client = thread.submit(compose.client, settings, spec)
                for reducer in pool:
                    reducer.welcome()
                made = stack.enter_context(client.result(5))
            return made, pool

        yield make


@pytest.fixture
def post(request):
    with ExitStack() as stack:
        yield Post(getattr(request, "param", PATIENCE), stack)
