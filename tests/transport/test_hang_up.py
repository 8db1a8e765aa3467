"""Who hangs up while a reducer is busy does nothing to it."""

import socket
import struct
import subprocess
import sys
import threading

import pytest

from hostile.zmtp import GREETING, HANDSHAKE, MORE, dial, frame
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST

# libzmq aborts its process if a heartbeat is due on a connection that it has stopped reading
# because too many messages wait, and whose peer has hung up: so no number is too many.
MESSAGES = frame(b"x") * 2500
REDUCER = """
import sys, time
from reducer.runtime.plain_transport import PlainTransport, make_context
from reducer.wire.constants import REDUCER_HEARTBEAT_MS
context = make_context(1)
transport = PlainTransport("tcp://127.0.0.1:0", context)
print(transport.port, flush=True)
changes = []
while not changes:
    changes = transport.changes(0.0)
((_, line),) = changes
while line.load(None, 0.0).read < int(sys.argv[1]):
    time.sleep(0.01)
print("has read it", flush=True)
sys.stdin.readline()
time.sleep(5 * REDUCER_HEARTBEAT_MS / 1000)
print(sum(len(list(transport.receive(0))) for _ in range(100)), flush=True)
transport.close()
context.destroy()
"""


def test_a_peer_that_hangs_up_with_much_unread():
    size = len(HANDSHAKE) + len(MESSAGES)
    with subprocess.Popen(
        [sys.executable, "-c", REDUCER, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as reducer:
        try:
            with dial(f"127.0.0.1:{reducer.stdout.readline().strip()}") as peer:
                peer.sendall(HANDSHAKE)
                *_, length = peer.recv(len(GREETING) + 2, socket.MSG_WAITALL)
                peer.recv(length, socket.MSG_WAITALL)  # READY: now it takes messages
                peer.sendall(MESSAGES)
                assert reducer.stdout.readline() == "has read it\n"
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            out, err = reducer.communicate("\n", timeout=60)
        finally:
            reducer.kill()
    assert reducer.returncode == 0, err
    assert out == "2500\n"


@pytest.mark.parametrize("impl", ["compiled"])
def test_what_a_stranger_is_told_last_reaches_it_when_the_reducer_ends(post):
    size = 16 << 20  # more than the kernel takes at once
    peer = post.stranger()
    first = (1).to_bytes(7, "little")
    header = Header(MessageType.ERROR).pack()
    assert post.transport.sockets.send(first, header, bytes(size))
    ending = threading.Thread(target=post.transport.sockets.end, args=(20_000,))
    ending.start()
    peer.settimeout(10)
    received = 0
    while part := peer.recv(1 << 20):
        received += len(part)
    ending.join()
    assert received > size


@pytest.mark.parametrize("impl", ["compiled"])
def test_a_member_that_leaves_with_results_that_nobody_could_take(post):
    # Its results fail one after the other, and its GOODBYE is read before anybody hears of that:
    # under the address sanitizer nothing may be read of the member, which is freed then.
    worker = post.member("alone", world_size=1)
    chunk = worker.common._replace(
        type=MessageType.CONTRIBUTION,
        sequence=1,
        total_bytes=12,
        nbytes=4,
        dtype=DType.FLOAT32,
        op=ReduceOp.SUM,
        wire_dtype=DType.FLOAT32,
    )
    said = [chunk._replace(offset=offset) for offset in (0, 4, 8)]
    words = b"".join(frame(header.pack(), MORE) + frame(bytes(4)) for header in said)
    goodbye = worker.common._replace(type=MessageType.GOODBYE)
    with worker.line.connection as connection:
        connection.sendall(words + frame(goodbye.pack()))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    post.until(lambda: not post.members)
    assert post.engine.counters.contributions == 3
    post.until(lambda: post.guard.connections == 0)
    post.member("next", world_size=1)
