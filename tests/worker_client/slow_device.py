"""A device of the tests: CPU memory, with streams that copy later, each on a thread of its own.

What real devices do and a `memcpy` does not, it does always: nothing is copied when a copy is asked
for, the ways overtake each other, and memory holds rubbish until a copy has reached it.
"""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from reducer.wire.constants import DType
from worker_client.client import client as client_module
from worker_client.staging import device, split_call

RUBBISH = 0xA5
PIECE = 4096  # bytes of a piece, with the fixture `devices`
DTYPES = [getattr(torch, dtype.name.lower()) for dtype in DType if not dtype.is_block]
VIEWS = {  # of a matrix
    "part": lambda whole: whole[1:-10],
    "transposed": lambda whole: whole.t(),
    "column": lambda whole: whole[:, 3],
    "strided": lambda whole: whole[::2, 1:].unsqueeze(1),
    "negated": lambda whole: torch.view_as_complex(whole.view(len(whole), -1, 2)).conj().imag,
}


class Stream:
    """Does one thing after another."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1)

    def do(self, job):
        """Return what waits for the job, and raises what it raised."""
        made = self._pool.submit(job)
        return SimpleNamespace(wait=made.result, done=made.done)

    def close(self):
        self._pool.shutdown(cancel_futures=True)


class SlowDevice:
    """One device; `compute` is its callers' current stream.

    Args:
        before: called by a stream before each of its copies, with the way and the number of copies
            that were made that way; may wait, or raise DeviceError.
    """

    def __init__(self, before=lambda _way, _number: None):
        self.compute = Stream()
        self._made = {"to_host": 0, "to_device": 0}
        self.blocks = 0
        self._before = before
        self._streams = {"to_host": Stream(), "to_device": Stream()}
        self._returning = threading.local()

    def pinned(self, nbytes):
        self.blocks += 1
        return torch.full((nbytes,), RUBBISH, dtype=torch.uint8)

    def follow(self, *tensors):
        self._streams["to_host"].do(self.mark(*tensors).wait)

    def mark(self, *tensors):
        del tensors
        return self.compute.do(lambda: None)

    @contextlib.contextmanager
    def leaving(self, mark):
        mark.wait()  # what this thread does there is done at once
        yield

    def to_host(self, block, source):
        return self._copy("to_host", block, source)

    def to_device(self, target, source):
        return self._copy("to_device", target, source)

    @contextlib.contextmanager
    def returning(self):
        self._returning.is_current = True
        try:
            yield
        finally:
            self._returning.is_current = False

    @property
    def is_returning(self):
        """Whether the stream of copies to the device is this thread's current one."""
        return getattr(self._returning, "is_current", False)

    def made(self, way):
        """Number of copies that were made one way."""
        return self._made[way]

    def close(self):
        for stream in (self.compute, *self._streams.values()):
            stream.close()

    def _copy(self, way, target, source):
        def copy():
            self._before(way, self.made(way))
            target.copy_(source)
            self._made[way] += 1

        return self._streams[way].do(copy)


class Devices:
    """The clients' devices, in the order of first calls; `before` may be replaced at any time."""

    def __init__(self):
        self.opened = []
        self.before = lambda _way, _number: time.sleep(0.001)

    def place(self, tensor):
        """Return a tensor on the device: any CPU tensor is."""
        return tensor

    def open(self, of):
        assert of.type == "cpu"
        self.opened.append(SlowDevice(self._before))
        return self.opened[-1]

    def _before(self, way, number):
        self.before(way, number)  # what it is then


class Gpu:
    """A real one instead, whose copies nothing holds up."""

    before = None

    @staticmethod
    def place(tensor):
        return tensor.cuda()


def stage_all():
    """From now on all of this process' tensors are on a slow device, and their pieces are small."""
    client_module.is_on_device = lambda data: isinstance(data, torch.Tensor)
    device.open_device = lambda _: SlowDevice()
    split_call.PIECE_BYTES = PIECE


class Gate:
    """Lets copies of one way pass from a certain number on only when it is opened."""

    def __init__(self, way, number=0):
        self._way, self._number = way, number
        self._open = threading.Event()

    def __call__(self, way, number):
        if way == self._way and number >= self._number:
            assert self._open.wait(30)

    def open(self):
        self._open.set()


def reduce_all(clients, tensors, **arguments):
    works = [
        client.all_reduce(tensor, **arguments)
        for client, tensor in zip(clients, tensors, strict=True)
    ]
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait(20) is tensor


def staging_threads():
    """Those of all clients that copy from and to a device; there are none until there is one."""
    return {one.name for one in threading.enumerate() if one.name in {"to-host", "to-device"}}
