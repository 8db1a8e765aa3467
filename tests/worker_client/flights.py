"""Flights, and the reducers' answers."""

from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from worker_client.protocol._flight import CompiledFlight

IDENTITY = Header(MessageType.HELLO, job=7, generation=3, rank=2)
WINDOW = 4096  # four small contributions
_next = {}  # number of each flight, by its id


def make(links=2, window=WINDOW, retain=False, kind=CompiledFlight, **identity):
    """A flight whose links are shut."""
    flight = kind(IDENTITY._replace(**identity))
    for _ in range(links):
        flight.add_link(window, retain)
    _next[id(flight)] = 0
    return flight


def opened(links=2, **given):
    """A flight whose links are open."""
    flight = make(links, **given)
    for link in range(links):
        flight.open(link)
    return flight


def submit(flight, asked, shards, chunk_bytes, epoch, *, left_out=0):
    """Submit it under the next number, or one so many beyond it, and return that."""
    asked.sequence = _next[id(flight)] + left_out
    _next[id(flight)] = asked.sequence + 1
    flight.submit(asked, shards, chunk_bytes, epoch)
    return asked.sequence


def header_of(send):
    return Header.unpack(send.header)


def where(sends):
    headers = [(send.link, header_of(send)) for send in sends]
    return [(link, header.sequence, header.offset) for link, header in headers]


def result(send, **change):
    """The frames that answer a contribution."""
    header = header_of(send)._replace(
        type=MessageType.RESULT, rank=0, watermark=0, since=0, history=0
    )
    payload = change.pop("payload", bytes(255 - byte for byte in send.payload))
    return header._replace(**change).pack(), payload


def take(flight, *arguments):
    """Give it a message; the numbers of what has ended with that, None if it does not take it.

    The oracle says numbers itself.
    """
    ended = flight.take(*arguments)
    return None if ended is None else [getattr(one, "sequence", one) for one in ended]


def answer(flight, send, now=2.0, **change):
    return take(flight, send.link, *result(send, **change), now)
