"""Each fault that lasts does what it says to real sockets, and no more."""

import socket
import struct
import time
from contextlib import suppress
from functools import partial

import pytest

from tests.faults.ends import (
    RAMP,
    in_background,
    is_over,
    is_quiet,
    is_reset,
    passes,
    receive,
    send_until_it_blocks,
)
from tests.waits import within_s

BOTH_WAYS = pytest.mark.parametrize("way", ["up", "down"])


# -- without faults -----------------------------------------------------------------------------


@BOTH_WAYS
def test_bytes_and_the_end_of_a_stream_pass(ends, way):
    sender, receiver = ends.pair(way)
    thread = in_background(lambda: sender.sendall(RAMP))
    assert receive(receiver, len(RAMP)) == RAMP
    thread.join()
    sender.shutdown(socket.SHUT_WR)
    assert receiver.recv(1) == b""
    assert passes(receiver, sender)  # the other direction goes on
    counts = ends.proxy.counts
    assert counts.connections == 1
    assert {counts.up_bytes, counts.down_bytes} == {len(RAMP), 4}


@BOTH_WAYS
def test_a_reset_passes(ends, way):
    sender, receiver = ends.pair(way)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sender.close()
    assert is_reset(receiver)


def test_a_target_that_is_not_there_resets(ends):
    ends.listener.close()
    with suppress(ConnectionResetError):  # it may come before the connection is known to be made
        assert is_reset(ends.dial())


# -- faults that last ---------------------------------------------------------------------------


@BOTH_WAYS
def test_a_delay_is_kept_in_its_direction_alone(ends, way):
    sender, receiver = ends.pair(way)
    ends.proxy.delay(way, 1.0)
    start = time.monotonic()
    assert passes(receiver, sender)
    within_s(0.9, start)
    assert passes(sender, receiver)
    assert 1.0 <= time.monotonic() - start < 10.0
    ends.proxy.delay(way, 0)
    start = time.monotonic()
    assert passes(sender, receiver)
    within_s(0.9, start)


def test_what_waits_in_a_delay_leaves_when_it_ends(ends):
    sender, receiver = ends.pair()
    ends.proxy.delay("both", 60)
    sender.sendall(b"ping")
    assert is_quiet(receiver)
    ends.proxy.restore()
    assert receive(receiver, 4) == b"ping"


def test_jitter_spreads_and_keeps_the_order(ends):
    sender, receiver = ends.pair()
    ends.proxy.delay("up", 0.0, jitter_s=0.1)
    times = []
    for value in range(12):  # one at a time: each is a piece of its own
        start = time.monotonic()
        assert passes(sender, receiver, bytes([value]))
        times.append(time.monotonic() - start)
    assert max(times) - min(times) > 0.03
    ends.proxy.throttle("up", 20_000)  # so that it is read in ten pieces
    sender.sendall(RAMP[:2000])
    assert receive(receiver, 2000) == RAMP[:2000]


@BOTH_WAYS
def test_a_rate_is_kept_by_all_connections_together(ends, way):
    pairs = [ends.pair(way), ends.pair(way)]
    ends.proxy.throttle(way, 1_000_000)
    start = time.monotonic()
    threads = [in_background(partial(one.sendall, RAMP[:200_000])) for one, _ in pairs]
    for _, receiver in pairs:
        assert receive(receiver, 200_000) == RAMP[:200_000]
    assert 0.35 <= time.monotonic() - start < 5.0
    for thread in threads:
        thread.join()
    receiver, sender = pairs[0]
    start = time.monotonic()
    thread = in_background(partial(sender.sendall, RAMP))
    assert receive(receiver, len(RAMP)) == RAMP
    within_s(0.9, start, "the other direction does not have all its rate")
    thread.join()


def test_a_rate_stops_the_sender(ends):
    sender, receiver = ends.pair()
    ends.proxy.throttle("up", 1000)
    sent = send_until_it_blocks(sender)
    assert sent < 32 << 20  # what the kernel's buffers take
    assert ends.proxy.counts.up_bytes < 5000
    ends.proxy.restore()
    thread = in_background(sender.close)
    assert len(receive(receiver, sent)) == sent
    thread.join()


def test_a_reader_that_stops_stops_the_sender(ends):
    sender, _ = ends.pair()
    sent = send_until_it_blocks(sender)
    assert sent < 48 << 20


@BOTH_WAYS
def test_a_partition_holds_bytes_and_ends_until_it_heals(ends, way):
    sender, receiver = ends.pair(way)
    assert passes(sender, receiver)
    ends.proxy.blackhole(way)
    sender.sendall(b"held")
    assert passes(receiver, sender)
    sender.close()
    assert is_quiet(receiver)
    receiver.sendall(b"to nobody")  # its reset does not come either
    assert is_quiet(receiver)
    ends.proxy.heal()
    assert receive(receiver, 4) == b"held"
    assert is_over(receiver)


@BOTH_WAYS
def test_a_partition_keeps_new_connections_from_the_reducer(ends, way):
    ends.proxy.blackhole(way)
    worker = ends.dial()
    worker.sendall(b"ping")
    assert is_quiet(ends.listener)
    assert is_quiet(worker)
    ends.proxy.heal("down" if way == "up" else "up")
    assert is_quiet(ends.listener)
    ends.proxy.heal(way)
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
    ends.proxy.refuse()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            ends.dial()
    assert passes(sender, receiver)
    ends.proxy.restore()
    assert passes(*ends.pair())
    assert ends.proxy.counts.connections == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda proxy: proxy.delay("up", -1),
        lambda proxy: proxy.delay("left", 1),
        lambda proxy: proxy.throttle("both", 0),
        lambda proxy: proxy.blackhole("left"),
        lambda proxy: proxy.cut("up", mid_frame=-1),
        lambda proxy: proxy.flip("both"),
        lambda proxy: proxy.flip("up", bit=8),
        lambda proxy: proxy.duplicate("up", 0),
    ],
)
def test_faults_that_cannot_be_are_refused(ends, call):
    with pytest.raises(ValueError, match="got"):
        call(ends.proxy)
