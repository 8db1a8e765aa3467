"""Who hangs up while a reducer is busy does nothing to it."""

import socket
import struct
import threading

from hostile.zmtp import MORE, frame
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


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
