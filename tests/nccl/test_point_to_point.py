"""Messages between ranks by the plug-in's tables, called as NCCL's proxy thread calls them."""

import ctypes
import gc
import multiprocessing
import os
import random
import signal
import socket
import struct
import time
from ctypes import byref
from ctypes import c_void_p as pointer
from pathlib import Path

import numpy as np
import psutil
import pytest

from harness.collective import compile_c
from tests.commands import run_command
from tests.nccl import tables
from tests.nccl.tables import VERSIONS, Net, PluginError
from tests.waits import eventually, within_s

KIB, MIB = 1 << 10, 1 << 20
THREADS = "tests/nccl/harness_point_to_point.c"
SOURCES = [str(path) for path in tables.path().parent.glob("*.c")]
EDGES = [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 16 * KIB * 4 + 3, MIB, 4 * MIB + 5]


@pytest.fixture(autouse=True, scope="module")
def _loopback():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDUCTION_INTERFACE", "lo")
        yield


def meet(net):
    """Return a sender and its receiver."""
    handle, listener = net.listen()
    sender = receiver = None
    deadline = time.monotonic() + 10
    while not (sender and receiver):
        assert time.monotonic() < deadline
        sender = sender or net.connect(handle)
        receiver = receiver or net.accept(listener)
    net.check(net.table.close_listener(listener))
    return sender, receiver


def part(net, sender, receiver):
    net.check(net.table.close_sender(sender))
    net.check(net.table.close_receiver(receiver))


@pytest.fixture(params=VERSIONS)
def net(request):
    return Net(request.param)


@pytest.fixture
def pair(net):
    sender, receiver = meet(net)
    yield net, sender, receiver
    part(net, sender, receiver)


@pytest.fixture
def newest():
    net = Net(VERSIONS[-1])
    sender, receiver = meet(net)
    yield net, sender, receiver
    part(net, sender, receiver)


def exchange(net, sender, receiver, sizes, *, ahead=8, seed=0):
    """Send messages of these sizes, `ahead` at once, tested in any order; look at every byte."""
    dice = random.Random(seed)
    sources = [
        np.random.default_rng([seed, at]).integers(0, 256, n, np.uint8)
        for at, n in enumerate(sizes)
    ]
    targets = [np.full(len(one) + dice.choice([0, 0, 7]), 0xA5, np.uint8) for one in sources]
    posted, pending, ended = {"send": 0, "receive": 0}, {}, 0
    deadline = time.monotonic() + 120
    while ended < 2 * len(sizes):
        assert time.monotonic() < deadline
        way = dice.choice(["send", "receive"])
        at = posted[way]
        if at < len(sizes) and sum(key[0] == way for key in pending) < ahead:
            begun = (
                net.send(sender, sources[at], tag=at)
                if way == "send"
                else net.receive(receiver, targets[at], tag=at)
            )
            if begun is not None:
                pending[way, at] = begun
                posted[way] += 1
        for key in dice.sample(sorted(pending), len(pending)):
            moved = net.test(pending[key])
            if moved is not None:
                assert moved == sizes[key[1]]
                del pending[key]
                ended += 1
    for source, target in zip(sources, targets, strict=True):
        assert (target[: len(source)] == source).all()
        assert (target[len(source) :] == 0xA5).all()


def test_messages_arrive_whole_and_in_order(pair):
    exchange(*pair, sizes=[*EDGES, *EDGES[::-1], *[3] * 40])


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    """Runs ranks that are threads of a program, with a sanitizer or none; what they have said."""
    own = ("LD_PRELOAD", "ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS")  # under `make sanitize`
    others = {name: value for name, value in os.environ.items() if name not in own}

    def run(version, pairs, messages, largest, sanitizer=""):
        folder = tmp_path_factory.getbasetemp() / f"threads-{sanitizer}"
        environment = {**others, "UBSAN_OPTIONS": "halt_on_error=1"} if sanitizer else os.environ
        watched = ["-g", f"-fsanitize={sanitizer}"] if sanitizer else []
        library = folder / "plugin.so" if sanitizer else tables.path()
        if not folder.exists():
            folder.mkdir()
            compile_c(folder / "ranks", THREADS, flags=watched, environment=environment)
            if sanitizer:
                flags = [*watched, "-shared", "-fPIC", "-fvisibility=hidden"]
                compile_c(library, *SOURCES, flags=flags, environment=environment)
        command = [folder / "ranks", library, version, pairs, messages, largest, 1]
        done = run_command(*command, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_that_are_threads_hear_all_and_that_one_has_closed(threads, version):
    said = threads(version, 4, 300, MIB)
    assert said.count("it has closed the connection") == 2
    assert said.count("sending to another rank: ") == 2


@pytest.mark.extended("test_ranks_that_are_threads_hear_all_and_that_one_has_closed")
def test_ten_thousand_messages_arrive(threads):
    threads(VERSIONS[-1], 2, 10_000, 256 * MIB)


@pytest.mark.extended("test_ranks_that_are_threads_hear_all_and_that_one_has_closed")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_a_sanitizer_finds_nothing(threads, sanitizer):
    for version in VERSIONS:
        threads(version, 4, 300, MIB, sanitizer)


def listen(net):
    """Return a handle, its listener and where that listens: this process may have others."""

    def listening():
        found = psutil.Process().net_connections()
        return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}

    before = listening()
    handle, listener = net.listen()
    (address,) = listening() - before
    return handle, listener, address


def test_other_streams_may_be_ahead_of_the_first(net):
    """That one tells lengths, and still brings the rest of a message when others bring the next."""
    handle, listener, address = listen(net)
    first, *others = streams = [socket.create_connection(address) for _ in range(4)]
    for at, stream in enumerate(streams):
        stream.sendall(struct.pack("=16sQII", handle.raw[8:24], 1, at, len(streams)))
    while (receiver := net.accept(listener)) is None:
        time.sleep(0.001)
    messages = np.random.default_rng(1).integers(0, 256, (2, 4, 32 * KIB), np.uint8)
    targets = np.zeros((2, 128 * KIB), np.uint8)
    requests = [net.receive(receiver, target) for target in targets]
    header = struct.pack("=Qq", targets[0].nbytes, 0)
    first.sendall(header + messages[0, 0, :9].tobytes())
    for at, stream in enumerate(others, 1):
        stream.sendall(messages[:, at].tobytes())
    for _ in range(100):
        assert net.test(requests[1]) is None
    first.sendall(messages[0, 0, 9:].tobytes() + header + messages[1, 0].tobytes())
    for request in requests:
        assert ended(net, request) == targets[0].nbytes
    assert (targets.ravel() == messages.ravel()).all()
    net.table.close_receiver(receiver)
    net.table.close_listener(listener)
    for stream in streams:
        stream.close()


def test_no_more_than_nccl_asks_for_are_in_flight(newest):
    net, sender, receiver = newest
    one = np.zeros(1, np.uint8)
    begun = [net.receive(receiver, one) for _ in range(33)]
    assert None not in begun[:32]
    assert begun[32] is None
    for _ in range(32):
        net.send(sender, one)
    ended(net, begun[0])
    assert net.receive(receiver, one) is not None


@pytest.mark.parametrize(("room", "tag", "why"), [(9, 5, "longer"), (10, 6, "tag")])
def test_a_message_that_is_not_the_one_awaited_is_an_error(newest, room, tag, why):
    net, sender, receiver = newest
    message, target = np.zeros(10, np.uint8), np.zeros(room, np.uint8)
    assert net.send(sender, message, tag=5)
    awaited = net.receive(receiver, target, tag=tag)
    with pytest.raises(PluginError) as raised:
        ended(net, awaited)
    assert raised.value.args[0] == tables.REMOTE_ERROR
    assert why in net.said[-1]


def sit(handle, nbytes, there):
    """Be the other rank: connect, send such messages, if of any bytes, until killed."""
    net = Net(VERSIONS[-1])
    handle = ctypes.create_string_buffer(handle, len(handle))
    while (sender := net.connect(handle)) is None:
        pass
    message = np.zeros(nbytes, np.uint8)
    request = net.send(sender, message) if nbytes else None
    there.send(None)
    while True:
        time.sleep(0.01)
        if request and net.test(request) is not None:
            request = net.send(sender, message)


@pytest.mark.parametrize("ours", ["waits for a message", "is in the middle of one"])
def test_a_sender_that_is_killed_is_noticed(ours):
    net = Net(VERSIONS[-1])
    handle, listener = net.listen()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    nbytes = 0 if ours == "waits for a message" else 64 * MIB
    other = context.Process(target=sit, args=(handle.raw, nbytes, there))
    other.start()
    target = np.zeros(max(nbytes, 1), np.uint8)
    try:
        while (receiver := net.accept(listener)) is None:
            time.sleep(0.001)
        request = net.receive(receiver, target)
        here.recv()
        os.kill(other.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PluginError) as raised:
            ended(net, request)
        within_s(2.0, start)
        assert raised.value.args[0] == tables.REMOTE_ERROR
        assert net.said
    finally:
        other.kill()
        other.join()
        net.table.close_receiver(receiver)
        net.table.close_listener(listener)


def ended(net, request):
    while (moved := net.test(request)) is None:
        pass
    return moved


def test_a_receiver_that_has_closed_is_noticed(net):
    sender, receiver = meet(net)
    net.table.close_receiver(receiver)
    message = np.zeros(32 * MIB, np.uint8)  # more than buffers in between have room for
    request = net.send(sender, message)
    start = time.monotonic()
    with pytest.raises(PluginError) as raised:
        ended(net, request)
    within_s(2.0, start)
    assert raised.value.args[0] == tables.REMOTE_ERROR
    net.table.close_sender(sender)


def test_strangers_at_a_listener_keep_nobody_out(net):
    handle, listener, address = listen(net)
    strangers = []
    for at in range(100):
        strangers.append(socket.create_connection(address))
        strangers[-1].send(os.urandom(at % 50))
        assert net.accept(listener) is None
    sender = receiver = None
    while not (sender and receiver):
        sender = sender or net.connect(handle)
        receiver = receiver or net.accept(listener)
    exchange(net, sender, receiver, sizes=[100, MIB])
    part(net, sender, receiver)
    net.table.close_listener(listener)
    for stranger in strangers:
        stranger.close()


def test_a_handle_of_another_plug_in_is_refused(net):
    with pytest.raises(PluginError) as raised:
        net.connect(ctypes.create_string_buffer(b"\x07" * 128, 128))
    assert raised.value.args[0] == tables.INVALID_ARGUMENT


def test_nobody_listens_is_an_error(net):
    handle, listener = net.listen()
    net.table.close_listener(listener)
    with pytest.raises(PluginError) as raised:
        eventually(lambda: net.connect(handle), 5.0)
    assert raised.value.args[0] == tables.REMOTE_ERROR
    assert "refused" in net.said[-1]


def test_devices_are_described(net):
    assert net.table.name == b"reduction"
    assert net.devices() == 1
    said = net.properties(0)
    assert (said.name, said.pointers, said.max_receives) == (b"lo", tables.HOST, 1)
    assert said.speed > 0
    with pytest.raises(PluginError):
        net.properties(1)
    if net.version > 8:
        assert (said.merged.count, said.merged.devices[0]) == (1, 0)
        assert min(said.max_message, said.max_collective) >= 512 * MIB


def test_memory_of_a_device_is_refused(net):
    memory = pointer()
    assert net.table.register_memory(None, None, 0, tables.HOST, byref(memory)) == tables.SUCCESS
    assert net.table.register_memory(None, None, 0, tables.CUDA, byref(memory)) != tables.SUCCESS


def test_setting_up_and_closing_leaves_nothing(net):
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    one = np.zeros(1, np.uint8)
    part(net, *meet(net))
    gc.collect()
    before = descriptors()
    for _ in range(20):
        sender, receiver = meet(net)
        net.receive(receiver, one)  # which nobody waits for
        part(net, sender, receiver)
    assert descriptors() == before
