"""A gather of the Horovod interface between its two all-reduces, with a client that is none."""

from concurrent.futures import Future

import numpy as np
import pytest

from reducer.errors import ConfigError, MismatchError

pytest.importorskip("torch", reason="needs torch")

from worker_client.horovod.groups import Group


class _Work:
    def __init__(self, data):
        self.data = data
        self.error = None
        self._future = Future()

    def end(self, error=None):
        self.error = error
        self._future.set_result(None)

    def done(self):
        return self._future.done()

    def ends_within(self, patience_s):
        return patience_s >= 0 and self.done()

    def wait(self):
        assert self.done()
        if self.error is not None:
            raise self.error

    def future(self):
        return self._future


class _Client:
    """Rank 0 of two; whoever tests is the other one, and ends its all-reduces."""

    rank, world_size, present = 0, 2, (0, 1)

    def __init__(self):
        self.works = []
        self.declined = []

    def all_reduce(self, data, op, *, name):
        assert op == "sum"
        self.works.append((name, _Work(data)))
        return self.works[-1][1]

    def decline(self, why, *, name):
        assert isinstance(why, ConfigError)
        self.declined.append(name)


def test_the_second_all_reduce_begins_where_the_first_ends():
    client = _Client()
    group = Group(client)
    with group.call("allgather", "x") as wire:
        pass
    gathering = group.gather(b"mine", wire)
    assert [name for name, _ in client.works] == ["allgather.x"]
    asked = client.works[0][1]
    asked.data[:] = [5, 7, 9]  # lengths, with a byte each for the end, and the sum of numbers
    asked.end()
    assert [name for name, _ in client.works] == ["allgather.x", "allgather.x#9"]
    assert not gathering.done()
    with pytest.raises(ConfigError, match="in progress"), group.call("allgather", "x"):
        pytest.fail("the name is taken")
    assert client.declined == ["allgather.x"]
    payloads = client.works[1][1]
    assert payloads.data.tobytes() == b"mine\1" + bytes(7)
    payloads.data[5:] = np.frombuffer(b"theirs\1", np.uint8)
    payloads.end()
    assert gathering.done()
    assert gathering.wait() == [b"mine", b"theirs"]
    with group.call("allgather", "x"):
        pass


def test_nothing_begins_after_an_error():
    client = _Client()
    group = Group(client)
    gathering = group.gather(b"mine", "allgather.x")
    client.works[0][1].end(MismatchError.between("call", "dtype", (0, "INT32"), (1, "INT64")))
    assert len(client.works) == 1
    assert gathering.done()
    with pytest.raises(MismatchError, match="INT64"):
        gathering.wait()
    with group.call("allgather", "x"):
        pass
