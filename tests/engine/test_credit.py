"""Windows that grow while a worker is a member: CREDIT."""

import pytest

from reducer.engine.limits import NO_LIMITS, Limits
from reducer.wire.constants import Feature
from reducer.wire.header import Header
from reducer.wire.messages import Welcome, decode
from tests.engine.driven import Driven, M, join, operation, sent
from tests.engine.words import WINDOW, Reducer, kinds

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
MEMORY = 12 * MIB
ROUND_TRIP_S = 0.2  # of the network; results take a little longer
TAKEN_S = 0.21


def pool(implementation, limits=NO_LIMITS):
    """A reducer of 12 MiB with job "job" of two ranks, whose chunks have 64 KiB."""
    reducer = Reducer(implementation, MEMORY, limits)
    for rank in range(2):
        (welcome,) = reducer.hello(rank, chunk_bytes=CHUNK, features=Feature.CREDIT)
        assert decode(Welcome, welcome.payload).features == Feature.CREDIT
    return reducer


def granted(sends):
    """The window of the one CREDIT that is said."""
    (send,) = sends
    header = Header.unpack(send.header)
    assert header.type is M.CREDIT
    return header.window


def ask(reducer, rank, window):
    return granted(reducer.say(rank, M.CREDIT, (1 << 64) - 1, window=window))


def test_a_larger_window_holds_more(implementation):
    reducer = pool(implementation)
    assert ask(reducer, 0, MIB) == MIB
    within = MIB // CHUNK + 4  # and what may exceed any window
    sent_bytes = bytes(CHUNK)
    for sequence in range(within):
        assert reducer.contribute(0, sequence, payload=sent_bytes) == []
    assert reducer.engine.held() == within * CHUNK
    assert kinds(reducer.contribute(0, within, payload=sent_bytes)) == [M.ERROR]
    assert reducer.engine.newly_dropped() == [b"0"]


def test_a_window_grows_into_half_of_what_other_jobs_leave(implementation):
    reducer = pool(implementation)
    # Three windows with 256 KiB besides each are half of 12 MiB.
    assert ask(reducer, 0, 1 << 40) == 2 * MIB - 256 * KIB
    assert reducer.engine.reserved() == 6 * MIB
    assert ask(reducer, 0, 1 << 40) == 2 * MIB - 256 * KIB
    assert reducer.engine.reserved() == 6 * MIB
    other = {"job": "other", "world_size": 1, "peer": b"other", "chunk_bytes": CHUNK}
    assert kinds(reducer.hello(0, window=3 * MIB - 256 * KIB, **other)) == [M.WELCOME]
    assert reducer.engine.reserved() == MEMORY
    assert ask(reducer, 1, 1 << 40) == 2 * MIB - 256 * KIB, "it was set aside with rank 0's"
    assert reducer.engine.reserved() == MEMORY


def test_the_limit_of_a_job_holds(implementation):
    reducer = pool(implementation, Limits(job_memory_limit=6 * MIB))
    assert ask(reducer, 0, 1 << 40) == MIB - 256 * KIB
    assert reducer.engine.reserved() == 3 * MIB, "half of it: other jobs of its key may come"


def test_a_rank_that_rejoins_gets_the_window_that_is_still_reserved(implementation):
    reducer = pool(implementation)
    most = ask(reducer, 0, 1 << 40)
    other = {"job": "other", "world_size": 1, "peer": b"other", "chunk_bytes": CHUNK}
    assert kinds(reducer.hello(0, window=3 * MIB - 256 * KIB, **other)) == [M.WELCOME]
    reducer.lose(b"0")
    assert M.WELCOME in kinds(reducer.hello(0, chunk_bytes=CHUNK, features=Feature.CREDIT))
    assert ask(reducer, 0, 1 << 40) == most


def test_a_window_never_shrinks(reducer):
    before = reducer.engine.reserved()
    assert ask(reducer, 0, 0) == WINDOW
    assert reducer.engine.reserved() == before


def test_a_reducer_announces_only_what_the_worker_has(implementation):
    (welcome,) = Reducer(implementation).hello(0)
    assert decode(Welcome, welcome.payload).features == 0


# -- the worker -------------------------------------------------------------------------------


@pytest.fixture
def far(implementation):
    """Makes rank 0 of 2, with a reducer that is so far away and has allowed 16 MiB."""

    def begin(round_trip_s=ROUND_TRIP_S, features=Feature.CREDIT, window=0):
        session = Driven(implementation, 0, 2, ("a:1",), window)
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
