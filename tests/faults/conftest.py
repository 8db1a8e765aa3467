"""Jobs whose ranks reach their reducers through proxies."""

from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tests.conftest import joined
from tests.faults.proxy import Proxy
from tests.faults.steps import begin, exact
from worker_client.client.client import Client


class Net(NamedTuple):
    """A job of two ranks that reaches each of its reducers through a proxy."""

    clients: list[Client]
    proxies: list[Proxy]


@pytest.fixture
def make_net(request):
    """Make jobs, each with proxies of its own, which have made a step; `what` tells them apart."""
    with ExitStack() as stack:

        def make(servers, what="", **arguments):
            proxies = [stack.enter_context(Proxy(server)) for server in servers]
            arguments = {"job": f"{request.node.name[:90]} {what}", "timeout": "20s", **arguments}
            addresses = [proxy.address for proxy in proxies]
            clients = stack.enter_context(joined(2, servers=addresses, **arguments))
            exact(begin(clients, 0))
            return Net(clients, proxies)

        yield make
