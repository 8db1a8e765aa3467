"""A session, and what its reducers say to it."""

from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header
from reducer.wire.messages import Welcome, encode, encode_error
from worker_client.protocol.flight import Finish, Send
from worker_client.protocol.operation import Operation
from worker_client.protocol.session import Session
from worker_client.protocol.spec import JobSpec

M = MessageType


class Driven:
    """A session whose actions are followed by what its flight then sends, as the client does."""

    def __init__(self, *given, **others):
        self.session = Session(JobSpec("job", 0, *given, **others))
        self.flight = self.session.flight
        self.links = self.session.links

    def __getattr__(self, name):
        event = getattr(self.session, name)
        if name not in {"connected", "disconnected", "submit", "tick", "close"}:
            return event
        return lambda *arguments: event(*arguments) + self.flight.refill(0.0)

    def receive(self, index, frame, payload):
        return self.session.receive(index, frame, payload, 0.0) + self.flight.refill(0.0)

    def in_flight(self, index):
        return self.flight.stats(index).in_flight


def join(session, index, incarnation="1", round_trip_s=0.0, **said):
    (hello,) = session.session.connected(index, round_trip_s)
    welcome = Header(M.WELCOME, window=Header.unpack(hello.header).window).pack()
    return session.receive(index, welcome, encode(Welcome(incarnation=incarnation, **said)))


def joined(*given, incarnation="1", **others):
    session = Driven(*given, **others)
    for link in session.links:
        join(session, link.index, incarnation)
    return session


def operation(data=256, timeout_s=10.0, **others):
    """An all-reduce of bytes, or of so many zeros."""
    fields = {"dtype": DType.UINT8, "op": ReduceOp.SUM, "name": "it", **others}
    return Operation(memoryview(bytearray(data)), timeout_s=timeout_s, **fields)


def sent(actions, kind=None):
    """Messages, perhaps of one kind, as (link, header)."""
    headers = [(a.link, Header.unpack(a.header)) for a in actions if isinstance(a, Send)]
    return [(link, header) for link, header in headers if kind in {None, header.type}]


def errors(actions):
    """What those hear, in order, whose all-reduces end."""
    heard = []
    for action in actions:
        if isinstance(action, Finish):
            action.operation.ended, action.operation.over = heard.append, False
            action.operation.end(action.error)
    return heard


def result(session, link, contribution):
    header = contribution._replace(type=M.RESULT, rank=0, watermark=0, since=0, history=0)
    return session.receive(link, header.pack(), b"\7" * contribution.nbytes)


def error(session, link, failure, sequence=(1 << 64) - 1):
    frame = Header(M.ERROR, sequence=sequence).pack()
    return session.receive(link, frame, encode_error(failure))
