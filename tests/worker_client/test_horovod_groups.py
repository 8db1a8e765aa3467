"""A gather of the Horovod interface: two all-reduces, of which the second begins by itself."""

import numpy as np
import pytest

from reducer.errors import MismatchError
from tests.waits import eventually

pytest.importorskip("torch", reason="needs torch")

from worker_client.horovod.groups import Group


def gather(group, payload):
    with group.call("allgather", "x") as wire:
        return group.gather(payload, wire)


def check(groups):
    """Gather at both ranks; nobody waits before it is done."""
    payloads = [b"mine", b"others'"]
    both = [gather(group, payload) for group, payload in zip(groups, payloads, strict=True)]
    eventually(lambda: all(one.done() for one in both))
    assert [one.wait() for one in both] == [payloads] * 2


def test_nothing_begins_after_an_error(job):
    clients = job(2)
    groups = [Group(client) for client in clients]
    gathering = gather(groups[0], b"mine")
    with pytest.raises(MismatchError):
        clients[1].all_reduce(np.ones(4, np.int32), "sum", name="allgather.x").wait(20)
    eventually(gathering.done)
    with pytest.raises(MismatchError, match="INT64"):
        gathering.wait()
    assert all(client.bytes_reduced == 0 for client in clients)
    check(groups)
