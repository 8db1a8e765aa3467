"""Each fault of the proxy does to real sockets what it says, and no more."""

import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.faults.proxy import Proxy
from tests.waits import within_s

BOTH_WAYS = pytest.mark.parametrize("way", ["up", "down"])
RAMP = bytes(range(256)) * 4096  # 1 MiB
FLIPPED = bytearray(RAMP[:150_000])
FLIPPED[100_000] ^= 0x40
QUIET_S = 0.1  # that nothing comes cannot be waited for


class Ends:
    """A proxy, the listening reducer behind it, and connections through it."""

    def __init__(self, stack):
        self._stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.settimeout(2)
        self.proxy = stack.enter_context(Proxy(f"127.0.0.1:{self.listener.getsockname()[1]}"))

    def dial(self):
        host, _, port = self.proxy.address.rpartition(":")
        return self._stack.enter_context(socket.create_connection((host, int(port)), 2))

    def answer(self):
        accepted, _ = self.listener.accept()
        accepted.settimeout(2)
        return self._stack.enter_context(accepted)

    def pair(self, way="up"):
        """A new connection's ends: who sends in that direction, and who receives."""
        worker, reducer = self.dial(), self.answer()
        return (worker, reducer) if way == "up" else (reducer, worker)


@pytest.fixture
def ends():
    before = set(threading.enumerate())
    with ExitStack() as stack:
        yield Ends(stack)
    assert set(threading.enumerate()) <= before


@pytest.fixture
def aside():
    """Do something in another thread."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


def receive(source, nbytes):
    data = bytearray()
    while len(data) < nbytes and (more := source.recv(nbytes - len(data))):
        data += more
    return bytes(data)


def passes(sender, receiver, data=b"ping"):
    sender.sendall(data)
    return receive(receiver, len(data)) == data


def is_quiet(source):
    return not select.select([source], [], [], QUIET_S)[0]


def is_reset(source):
    with pytest.raises(ConnectionResetError):
        source.recv(1)
    return True


def is_over(source):
    try:
        return source.recv(1) == b""
    except ConnectionResetError:
        return True


# -- faults that happen once ----------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize(
    ("shots", "sent", "came"),
    [
        ([("cut", 0)], RAMP[:100], b""),
        ([("cut", 300_000)], RAMP[:300_100], RAMP[:300_000]),
        ([("flip", 100_000, {"amount": 6})], RAMP[:150_000], FLIPPED),
        ([("flip", 1, {"after": b"magic"})], b"magic-a", b"magic-`"),
        ([("duplicate", 6, {"amount": 4})], b"abcdefgh", b"abcdefcdefgh"),
        ([("flip", 5), ("duplicate", 3, {"amount": 2}), ("cut", 7)], b"abcdefgh", b"abcbcdegg"),
    ],
    ids=["torn at once", "torn", "flipped", "flipped after", "twice", "several"],
)
def test_one_connection_is_hit_where_it_was_aimed(ends, way, shots, sent, came):
    sender, receiver = ends.pair(way)
    bystander = ends.pair(way)
    assert passes(sender, receiver)
    fired = [ends.proxy.shoot(way, *shot[:2], **dict(*shot[2:])) for shot in shots]
    sender.sendall(sent)
    assert receive(receiver, len(came)) == came
    assert all(one.wait(20) for one in fired)
    torn = shots[-1][0] == "cut"
    if torn:
        assert is_reset(receiver)
        assert is_reset(sender)
    assert passes(*bystander)
    assert ends.proxy.cuts == torn


def test_a_torn_frame_is_whole_up_to_there_for_a_slow_reader_too(ends):
    ends.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sender, receiver = ends.pair()
    fired = ends.proxy.shoot("up", "cut", 500_000)
    sender.sendall(RAMP[:500_000])
    assert not fired.wait(0.1)  # most of it is still on this side
    assert receive(receiver, 500_000) == RAMP[:500_000]
    assert is_reset(receiver)
    assert fired.is_set()


def test_a_cut_resets_all_connections_and_no_later_one_and_a_shot_outlives_it(ends):
    pairs = [ends.pair(), ends.pair()]
    ends.proxy.shoot("up", "flip", 10)
    assert all(passes(*pair) for pair in pairs)
    ends.proxy.cut()
    assert all(is_reset(end) for pair in pairs for end in pair)
    sender, receiver = ends.pair()
    sender.sendall(bytes(20))
    assert receive(receiver, 20) == bytes(10) + b"\1" + bytes(9)
    ends.proxy.shoot("up", "flip")
    ends.proxy.restore()
    assert passes(sender, receiver)


# -- faults that last -----------------------------------------------------------------------------


@BOTH_WAYS
def test_a_delay_is_kept_in_its_direction_alone_until_it_ends(ends, way):
    sender, receiver = ends.pair(way)
    ends.proxy.set(way, delay_s=1.0)
    start = time.monotonic()
    assert passes(receiver, sender)
    within_s(0.9, start)
    assert passes(sender, receiver)
    assert time.monotonic() - start >= 1.0
    ends.proxy.set("both", delay_s=60.0)
    sender.sendall(b"ping")
    assert is_quiet(receiver)
    ends.proxy.restore()
    assert receive(receiver, 4) == b"ping"


@BOTH_WAYS
def test_a_rate_is_kept_by_all_connections_together(ends, aside, way):
    pairs = [ends.pair(way), ends.pair(way)]
    ends.proxy.set(way, bytes_per_s=1e6)
    start = time.monotonic()
    for sender, _ in pairs:
        aside(sender.sendall, RAMP[:200_000])
    for _, receiver in pairs:
        assert receive(receiver, 200_000) == RAMP[:200_000]
    assert time.monotonic() - start >= 0.35
    receiver, sender = pairs[0]
    start = time.monotonic()
    aside(sender.sendall, RAMP)
    assert receive(receiver, len(RAMP)) == RAMP
    within_s(0.9, start, "the other direction does not have all its rate")


@BOTH_WAYS
def test_a_partition_holds_bytes_ends_and_new_connections_until_it_heals(ends, way):
    sender, receiver = ends.pair(way)
    ends.proxy.set(way, parted=True)
    sender.sendall(b"held")
    assert passes(receiver, sender)
    sender.close()
    receiver.sendall(b"to nobody")  # its reset does not come either
    worker = ends.dial()
    worker.sendall(b"ping")
    assert all(is_quiet(one) for one in (receiver, worker, ends.listener))
    ends.proxy.set("down" if way == "up" else "up", parted=False)
    assert is_quiet(ends.listener)
    ends.proxy.set(way, parted=False)
    assert receive(receiver, 4) == b"held"
    assert is_over(receiver)
    assert receive(ends.answer(), 4) == b"ping"


def test_not_a_byte_passes_once_it_is_parted(ends, aside):
    sender, receiver = ends.pair()
    aside(sender.sendall, RAMP * 32)
    receive(receiver, len(RAMP))  # so that the proxy is in the middle of it
    ends.proxy.set("both", parted=True)
    (passed,) = ends.proxy.passed("up")
    receive(receiver, passed - len(RAMP))
    assert is_quiet(receiver)
    assert ends.proxy.passed("up") == [passed]
    ends.proxy.set("both", parted=False)
    assert len(receive(receiver, 32 * len(RAMP) - passed)) == 32 * len(RAMP) - passed
