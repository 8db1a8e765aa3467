"""Windows that grow while a worker is a member: CREDIT."""

import pytest

from reducer.wire.constants import Feature
from reducer.wire.header import Header
from tests.engine.driven import Driven, M, join, operation, sent
from tests.engine.transcripts import transcripts

KIB, MIB = 1 << 10, 1 << 20
ROUND_TRIP_S = 0.2  # of the network; results take a little longer
TAKEN_S = 0.21


# A reducer of 12 MiB with job "job" of two ranks, whose chunks have 64 KiB.
POOL = """
    new memory_limit=12<<20
    0 1 HELLO chunk_bytes=1<<16 features=Feature.CREDIT -> 0 1 WELCOME features=Feature.CREDIT
"""
test_windows = transcripts(
    """
A larger window holds more
    0 CREDIT window=1<<20 -> 0 CREDIT window=1<<20
    0 CONTRIBUTION range(20) bytes=1<<16        # 16, and what may exceed any window
    held 20<<16
    0 CONTRIBUTION 20 bytes=1<<16 -> 0 CapacityError
    dropped 0

A window grows into half of what other jobs leave
    # Three windows with 256 KiB besides each are half of 12 MiB.
    0 CREDIT window=1<<40 -> 0 CREDIT window=(2<<20)-(256<<10)
    reserved 6<<20
    0 CREDIT window=1<<40 -> 0 CREDIT window=(2<<20)-(256<<10)
    reserved 6<<20
    0@other HELLO job=other world_size=1 chunk_bytes=1<<16 window=(3<<20)-(256<<10)
        -> other WELCOME
    reserved 12<<20
    1 CREDIT window=1<<40 -> 1 CREDIT window=(2<<20)-(256<<10)  # it was set aside with rank 0's
    reserved 12<<20

The limit of a job holds
    new memory_limit=12<<20 job_memory_limit=6<<20
    0 1 HELLO chunk_bytes=1<<16 features=Feature.CREDIT -> 0 1 WELCOME features=Feature.CREDIT
    0 CREDIT window=1<<40 -> 0 CREDIT window=(1<<20)-(256<<10)
    reserved 3<<20                              # half of it: other jobs of its key may come

A rank that rejoins gets the window that is still reserved
    0 CREDIT window=1<<40 -> 0 CREDIT window=?most
    0@other HELLO job=other world_size=1 chunk_bytes=1<<16 window=(3<<20)-(256<<10)
        -> other WELCOME
    lose 0
    0 HELLO chunk_bytes=1<<16 features=Feature.CREDIT -> 0 WELCOME
    0 CREDIT window=1<<40 -> 0 CREDIT window=most

A window never shrinks
    ranks 2
    reserved 3*(WINDOW+(1<<20))
    0 CREDIT window=0 -> 0 CREDIT window=WINDOW
    reserved 3*(WINDOW+(1<<20))

A reducer announces only what the worker has
    new
    0 HELLO -> 0 WELCOME features=0
""",
    POOL,
)


@pytest.fixture
def far():
    """Makes rank 0 of 2, with a reducer that is so far away and has allowed 16 MiB."""

    def begin(round_trip_s=ROUND_TRIP_S, features=Feature.CREDIT, window=0):
        session = Driven(0, 2, ("a:1",), window)
        join(session, 0, round_trip_s=round_trip_s, features=features)
        return session

    return begin


class Journey:
    """An all-reduce of 80 MiB, whose results come a round trip after their contributions."""

    def __init__(self, session):
        self.session, self.now = session, 1.0
        self.under_way = sent(session.session.submit(operation(80 * MIB), self.now))
        self.refill()

    def refill(self):
        self.under_way += sent(self.session.flight.refill(self.now), M.CONTRIBUTION)

    def go_on(self):
        """Let a round trip pass; return the windows that are asked for then."""
        self.now += TAKEN_S
        arrived, self.under_way = self.under_way, []
        for _, header in arrived:
            result = header._replace(type=M.RESULT, rank=0, watermark=0, since=0, history=0)
            self.session.session.receive(0, result.pack(), bytes(header.nbytes), self.now)
        asked = sent(self.session.session.tick(self.now), M.CREDIT)
        self.refill()
        return [header.window for _, header in asked]


def allow(session, window):
    assert session.session.receive(0, Header(M.CREDIT, window=window).pack(), b"", 2.0) == []


def test_a_worker_asks_for_what_rate_and_round_trip_ask_for(far):
    session = far()
    journey = Journey(session)
    # 512 KiB and five round trips of the rate, which is the window in each.
    assert journey.go_on() == []
    assert session.flight.stats(0).window == pytest.approx(3 * MIB, rel=0.01)
    assert journey.go_on() == []
    (asked,) = journey.go_on()
    rate = 15.5 * MIB / TAKEN_S
    assert asked == pytest.approx(MIB / 2 + 5 * ROUND_TRIP_S * rate, rel=0.01)
    assert session.in_flight(0) == 16 * MIB
    allow(session, 20 * MIB)
    assert journey.go_on() == []
    assert session.flight.stats(0).window == session.in_flight(0) == 20 * MIB
    allow(session, 0)
    journey.go_on()
    assert session.flight.stats(0).window == 20 * MIB


def test_it_asks_again_a_second_later(far):
    session = far()
    journey = Journey(session)
    asked = [len(journey.go_on()) for _ in range(8)]
    assert asked == [0, 0, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"features": 0}, "the reducer does not know CREDIT"),
        ({"window": 8 * MIB}, "it was set"),
    ],
)
def test_others_do_not_ask(far, given, why):
    session = far(**given)
    journey = Journey(session)
    assert [journey.go_on() for _ in range(4)] == [[]] * 4, why
    allow(session, 64 * MIB)
    journey.refill()
    assert session.flight.stats(0).window <= 16 * MIB
