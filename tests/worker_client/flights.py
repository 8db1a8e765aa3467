"""Flights of both implementations, and the reducers' answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from worker_client.runtime import implementation

if TYPE_CHECKING:
    from worker_client.protocol.flight import Flight, LinkShard, Send
    from worker_client.protocol.operation import Operation

IDENTITY = Header(MessageType.HELLO, job=7, generation=3, rank=2)
WINDOW = 4096  # four small contributions
_next: dict[int, int] = {}  # number of each flight, by its id


def make(
    name: str, links: int = 2, window: int = WINDOW, keep: bool = False, **identity: int
) -> Flight:
    """A flight whose links are shut."""
    chosen = implementation.select(name)
    assert chosen.name == name
    flight = chosen.flight(IDENTITY._replace(**identity))
    for _ in range(links):
        flight.add_link(window, keep)
    _next[id(flight)] = 0
    return flight


def opened(name: str, links: int = 2, **given: Any) -> Flight:
    """A flight whose links are open."""
    flight = make(name, links, **given)
    for link in range(links):
        flight.open(link)
    return flight


def submit(
    flight: Flight,
    asked: Operation,
    shards: list[LinkShard],
    chunk_bytes: int,
    epoch: int,
    *,
    left_out: int = 0,
) -> int:
    """Submit it under the next number, or one so many beyond it, and return that."""
    asked.sequence = _next[id(flight)] + left_out
    _next[id(flight)] = asked.sequence + 1
    flight.submit(asked, shards, chunk_bytes, epoch)
    return asked.sequence


def header_of(send: Send) -> Header:
    return Header.unpack(send.header)


def where(sends: list[Send]) -> list[tuple[int, int, int]]:
    headers = [(send.link, header_of(send)) for send in sends]
    return [(link, header.sequence, header.offset) for link, header in headers]


def result(send: Send, **change: Any) -> tuple[bytes, bytes]:
    """The frames that answer a contribution."""
    header = header_of(send)._replace(
        type=MessageType.RESULT, rank=0, watermark=0, since=0, history=0
    )
    payload = change.pop("payload", bytes(255 - byte for byte in send.payload))
    return header._replace(**change).pack(), payload


def answer(flight: Flight, send: Send, now: float = 2.0, **change: Any) -> list[int] | None:
    return flight.take(send.link, *result(send, **change), now)
