"""Each fault of the proxy does to real sockets what it says, and no more."""

import socket
import time
from functools import partial

import pytest

from tests.faults.ends import RAMP, in_background, is_over, is_quiet, is_reset, passes, receive
from tests.waits import within_s

BOTH_WAYS = pytest.mark.parametrize("way", ["up", "down"])
FLIPPED = bytearray(RAMP[:150_000])
FLIPPED[100_000] ^= 0x40


def several(proxy, way):
    proxy.flip(way, 5)
    proxy.duplicate(way, 2, offset=1)
    return proxy.cut(way, mid_frame=7)


# -- faults that happen once ----------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize(
    ("shoot", "sent", "came", "torn"),
    [
        (lambda proxy, way: proxy.cut(way, mid_frame=0), RAMP[:100], b"", True),
        (
            lambda proxy, way: proxy.cut(way, mid_frame=300_000),
            RAMP[:300_100],
            RAMP[:300_000],
            True,
        ),
        (lambda proxy, way: proxy.flip(way, 100_000, bit=6), RAMP[:150_000], FLIPPED, False),
        (lambda proxy, way: proxy.flip(way, 1, after=b"magic"), b"magic-a", b"magic-`", False),
        (lambda proxy, way: proxy.duplicate(way, 4, offset=2), b"abcdefgh", b"abcdefcdefgh", False),
        (several, b"abcdefgh", b"abcbcdegg", True),
    ],
    ids=["torn at once", "torn", "flipped", "flipped after", "twice", "several"],
)
def test_one_connection_is_hit_where_it_was_aimed(ends, way, shoot, sent, came, *, torn):
    sender, receiver = ends.pair(way)
    bystander = ends.pair(way)
    assert passes(sender, receiver)
    fired = shoot(ends.proxy, way)
    sender.sendall(sent)
    assert receive(receiver, len(came)) == came
    assert fired.wait(20)
    if torn:
        assert is_reset(receiver)
        assert is_reset(sender)
    assert passes(*bystander)
    assert ends.proxy.counts.cuts == torn


def test_a_torn_frame_is_whole_up_to_there_for_a_slow_reader_too(ends):
    ends.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sender, receiver = ends.pair()
    fired = ends.proxy.cut("up", mid_frame=500_000)
    sender.sendall(RAMP[:500_000])
    assert not fired.wait(0.1)  # most of it is still on this side
    assert receive(receiver, 500_000) == RAMP[:500_000]
    assert is_reset(receiver)
    assert fired.is_set()


def test_a_cut_resets_all_connections_and_no_later_one_and_a_shot_outlives_it(ends):
    pairs = [ends.pair(), ends.pair()]
    ends.proxy.flip("up", 10)
    assert all(passes(*pair) for pair in pairs)
    assert ends.proxy.cut().is_set()
    assert all(is_reset(end) for pair in pairs for end in pair)
    sender, receiver = ends.pair()
    sender.sendall(bytes(20))
    assert receive(receiver, 20) == bytes(10) + b"\1" + bytes(9)
    ends.proxy.flip("up", 0)
    ends.proxy.restore()
    assert passes(sender, receiver)


# -- faults that last -----------------------------------------------------------------------------


@BOTH_WAYS
def test_a_delay_is_kept_in_its_direction_alone_until_it_ends(ends, way):
    sender, receiver = ends.pair(way)
    ends.proxy.delay(way, 1.0)
    start = time.monotonic()
    assert passes(receiver, sender)
    within_s(0.9, start)
    assert passes(sender, receiver)
    assert time.monotonic() - start >= 1.0
    ends.proxy.delay("both", 60)
    sender.sendall(b"ping")
    assert is_quiet(receiver)
    ends.proxy.restore()
    assert receive(receiver, 4) == b"ping"


@BOTH_WAYS
def test_a_rate_is_kept_by_all_connections_together(ends, way):
    pairs = [ends.pair(way), ends.pair(way)]
    ends.proxy.throttle(way, 1_000_000)
    start = time.monotonic()
    threads = [in_background(partial(one.sendall, RAMP[:200_000])) for one, _ in pairs]
    for _, receiver in pairs:
        assert receive(receiver, 200_000) == RAMP[:200_000]
    assert time.monotonic() - start >= 0.35
    receiver, sender = pairs[0]
    start = time.monotonic()
    threads.append(in_background(partial(sender.sendall, RAMP)))
    assert receive(receiver, len(RAMP)) == RAMP
    within_s(0.9, start, "the other direction does not have all its rate")
    for thread in threads:
        thread.join()


@BOTH_WAYS
def test_a_partition_holds_bytes_ends_and_new_connections_until_it_heals(ends, way):
    sender, receiver = ends.pair(way)
    ends.proxy.blackhole(way)
    sender.sendall(b"held")
    assert passes(receiver, sender)
    sender.close()
    receiver.sendall(b"to nobody")  # its reset does not come either
    worker = ends.dial()
    worker.sendall(b"ping")
    assert all(is_quiet(one) for one in (receiver, worker, ends.listener))
    ends.proxy.heal("down" if way == "up" else "up")
    assert is_quiet(ends.listener)
    ends.proxy.heal(way)
    assert receive(receiver, 4) == b"held"
    assert is_over(receiver)
    assert receive(ends.answer(), 4) == b"ping"


def test_not_a_byte_passes_once_it_is_parted(ends):
    sender, receiver = ends.pair()
    thread = in_background(lambda: sender.sendall(RAMP * 32))
    receive(receiver, len(RAMP))  # so that the proxy is in the middle of it
    ends.proxy.blackhole("both")
    passed = ends.proxy.counts.up_bytes
    receive(receiver, passed - len(RAMP))
    assert is_quiet(receiver)
    assert ends.proxy.counts.up_bytes == passed
    ends.proxy.heal()
    assert len(receive(receiver, 32 * len(RAMP) - passed)) == 32 * len(RAMP) - passed
    thread.join()


def test_refused_connections_and_those_that_go_on(ends):
    sender, receiver = ends.pair()
    ends.proxy.refuse()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            ends.dial()
    assert passes(sender, receiver)
    ends.proxy.restore()
    assert passes(*ends.pair())
    assert ends.proxy.counts.connections == 2
