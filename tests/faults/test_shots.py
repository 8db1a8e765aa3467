"""Each fault that happens once happens just there."""

import socket

import pytest

from tests.faults.ends import RAMP, is_reset, passes, receive

BOTH_WAYS = pytest.mark.parametrize("way", ["up", "down"])


def test_a_cut_resets_all_connections_and_no_later_one(ends):
    pairs = [ends.pair(), ends.pair()]
    assert all(passes(*pair) for pair in pairs)
    assert ends.proxy.cut().is_set()
    for pair in pairs:
        assert all(is_reset(end) for end in pair)
    assert ends.proxy.counts.cuts == 2
    assert passes(*ends.pair())


@BOTH_WAYS
@pytest.mark.parametrize("nbytes", [0, 7, 300_000])
def test_a_frame_is_torn_after_exactly_so_many_bytes(ends, way, nbytes):
    sender, receiver = ends.pair(way)
    bystander = ends.pair(way)
    assert passes(sender, receiver)
    fired = ends.proxy.cut(way, mid_frame=nbytes)

    sender.sendall(RAMP[: nbytes + 100])
    assert receive(receiver, nbytes) == RAMP[:nbytes]
    assert is_reset(receiver)
    assert is_reset(sender)
    assert fired.is_set()
    assert ends.proxy.counts.cuts == 1
    assert passes(*bystander)


def test_a_torn_frame_is_whole_up_to_there_for_a_slow_reader_too(ends):
    ends.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sender, receiver = ends.pair()
    fired = ends.proxy.cut("up", mid_frame=500_000)
    sender.sendall(RAMP[:500_000])
    assert not fired.wait(0.1)  # most of it is still on this side
    assert receive(receiver, 500_000) == RAMP[:500_000]
    assert is_reset(receiver)
    assert fired.is_set()


@BOTH_WAYS
def test_one_bit_is_flipped(ends, way):
    sender, receiver = ends.pair(way)
    assert passes(sender, receiver)
    fired = ends.proxy.flip(way, 100_000, bit=6)
    sender.sendall(RAMP[:80_000])
    assert receive(receiver, 80_000) == RAMP[:80_000]
    assert not fired.is_set()
    sender.sendall(RAMP[80_000:150_000])
    expected = bytearray(RAMP[80_000:150_000])
    expected[20_000] ^= 0x40
    assert receive(receiver, 70_000) == expected
    assert fired.wait(20)
    assert ends.proxy.counts.flips == 1


def test_a_shot_can_be_aimed_at_bytes_of_the_stream(ends):
    bystander = ends.pair()
    sender, receiver = ends.pair()
    fired = ends.proxy.flip("up", 1, after=b"magic")
    assert passes(*bystander, b"mag")
    assert passes(sender, receiver, b"..mag")  # found although it comes in two pieces
    assert passes(*bystander, b"ik")
    sender.sendall(b"ic-abc magic-abc")
    assert receive(receiver, 16) == b"ic-`bc magic-abc"
    assert fired.wait(20)


@BOTH_WAYS
def test_bytes_are_passed_on_twice(ends, way):
    sender, receiver = ends.pair(way)
    fired = ends.proxy.duplicate(way, 4, offset=2)
    sender.sendall(b"abcdefgh")
    assert receive(receiver, 12) == b"abcdefcdefgh"
    assert fired.wait(20)
    assert ends.proxy.counts.duplicated_bytes == 4


def test_several_shots_hit_where_they_were_aimed(ends):
    sender, receiver = ends.pair()
    ends.proxy.flip("up", 5)
    ends.proxy.duplicate("up", 2, offset=1)
    fired = ends.proxy.cut("up", mid_frame=7)
    sender.sendall(b"abcdefgh")
    assert receive(receiver, 9) == b"abcbcdegg"
    assert is_reset(receiver)
    assert fired.is_set()


def test_a_shot_outlives_a_connection_and_not_a_restoration(ends):
    sender, receiver = ends.pair()
    ends.proxy.flip("up", 10)
    assert passes(sender, receiver)
    ends.proxy.cut()
    sender, receiver = ends.pair()
    sender.sendall(bytes(20))
    assert receive(receiver, 20) == bytes(10) + b"\1" + bytes(9)
    ends.proxy.flip("up", 0)
    ends.proxy.restore()
    assert passes(sender, receiver)
