"""What a worker has in flight: the compiled flight beside its oracle, in any order of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reducer.wire.constants import PLACES, MessageType, ReduceOp
from reducer.wire.header import Header
from tests.engine.driven import operation
from tests.twins.flight import PlainFlight
from tests.worker_client.flights import WINDOW, header_of, make, result, submit, take
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.flight import LinkShard

CHOICE = st.randoms(use_true_random=False)


class Twin:
    """A flight, its own copy of every buffer, and what it has sent."""

    def __init__(self, flight):
        self.flight, self.buffers, self.sends = flight, [], []


def kept(twin, sequence, offset):
    found = twin.flight.retained(sequence, offset)
    return found and (Header.unpack(found[0]), bytes(found[1]))


class Twins(RuleBasedStateMachine):
    """Whatever is asked of both, both answer the same."""

    @initialize(
        links=st.integers(1, 3),
        rank=st.integers(0, 2),
        window=st.sampled_from([1, WINDOW]),
        retain=st.booleans(),
    )
    def begin(self, links, rank, window, retain):
        self.links = links
        self.now = 0.0
        self.active = set()
        kinds = PlainFlight, CompiledFlight
        made = [make(links, window, retain, kind, rank=rank) for kind in kinds]
        self.twins = [Twin(flight) for flight in made]

    def both(self, ask):
        """Ask both and return the common answer."""
        self.now += 0.001
        plain, compiled = (ask(twin) for twin in self.twins)
        assert plain == compiled
        return plain

    def link(self, choice):
        return choice.randrange(self.links)

    @rule(
        choice=CHOICE,
        sizes=st.lists(st.integers(1, 6), max_size=5),
        left_out=st.sampled_from([0, 0, 1, PLACES - 1, 100 * PLACES]),
    )
    def submit(self, choice, sizes, left_out):
        cut, end = [], 0
        for size in sizes:
            start, end = end, end + 64 * size
            cut.append(LinkShard(self.link(choice), start, end))
        cut = cut or [LinkShard(self.link(choice), 0, 0)]
        chunk_bytes, epoch = 64 * choice.randint(1, 3), choice.randint(0, 2)
        data = choice.randbytes(end)
        since, history = choice.getrandbits(32), choice.getrandbits(64)

        def ask(twin):
            twin.buffers.append(operation(data))
            twin.buffers[-1].since, twin.buffers[-1].history = since, history
            return submit(twin.flight, twin.buffers[-1], cut, chunk_bytes, epoch, left_out=left_out)

        self.active.add(self.both(ask))

    @rule(choice=CHOICE, window=st.sampled_from([0, 1000, 4096, 1 << 20]))
    def change_a_link(self, choice, window):
        link = self.link(choice)
        self.both(lambda twin: twin.flight.open(link))
        self.both(lambda twin: twin.flight.set_window(link, window))

    @rule()
    def refill(self):
        def ask(twin):
            sends = twin.flight.refill(self.now)
            twin.sends += sends
            return [(send.link, header_of(send), bytes(send.payload)) for send in sends]

        self.both(ask)

    @precondition(lambda self: self.twins[0].sends)
    @rule(choice=CHOICE, odd=st.integers(0, 9))
    def answer(self, choice, odd):
        at = choice.randrange(len(self.twins[0].sends))
        send = self.twins[0].sends[at]
        link = send.link if odd else self.link(choice)
        changes = [{}] * 9 + [
            {"offset": header_of(send).offset + 64},
            {"sequence": header_of(send).sequence + 1},
            {"nbytes": 64, "payload": bytes(64)},
            {"op": ReduceOp.MIN},
        ]
        change = choice.choice(changes)
        frames = result(send, **dict(change))
        done = self.both(lambda twin: take(twin.flight, link, *frames, self.now))
        self.active -= set(done or ())

    @precondition(lambda self: self.active)
    @rule(choice=CHOICE, whole=st.booleans())
    def give_up(self, choice, whole):
        sequence, link = choice.choice(sorted(self.active)), self.link(choice)
        if whole:
            self.active.remove(sequence)
            self.both(lambda twin: twin.flight.end(sequence))
        else:
            self.both(lambda twin: twin.flight.forget(link, sequence))

    @rule(choice=CHOICE, often=st.integers(0, 3))
    def lose_a_link(self, choice, often):
        link = self.link(choice)
        if often == 0:
            self.both(lambda twin: twin.flight.shut(link))

    @rule(choice=CHOICE, whole=st.booleans())
    def move(self, choice, whole):
        link = self.link(choice)
        carried = sorted(self.both(lambda twin: sorted(twin.flight.carried(link))))
        if not whole:
            carried = carried[choice.randint(0, len(carried)) :][:2]
        for chunk in carried:
            to = self.link(choice)
            self.both(lambda twin, at=(chunk.sequence, chunk.offset, to): twin.flight.move(*at))

    @rule(choice=CHOICE, often=st.integers(0, 3))
    def confirm(self, choice, often):
        if often == 0:
            reached = choice.randint(0, self.twins[0].flight.watermark)
            self.both(lambda twin: twin.flight.confirm(reached))

    @rule(choice=CHOICE, payload=st.sampled_from([b"", b"", b"{}"]))
    def hear_a_ping(self, choice, payload):
        link, reached = self.link(choice), choice.randint(0, self.twins[0].flight.watermark)
        ping = Header(MessageType.PING, watermark=reached).pack()
        if self.both(lambda twin: take(twin.flight, link, ping, payload, self.now)) is None:
            self.both(lambda twin: twin.flight.suppress_pings(link, not payload))

    @invariant()
    def they_agree(self):
        plain, compiled = (twin.flight for twin in self.twins)
        assert plain.watermark == compiled.watermark
        assert plain.reached == compiled.reached
        assert plain.retained_bytes == compiled.retained_bytes
        for link in range(self.links):
            stats = plain.stats(link)
            assert compiled.stats(link)[:7] == pytest.approx(stats[:7], abs=1e-6)
            assert stats.in_flight >= 0
            self.both(lambda twin, link=link: twin.flight.needs(link))
            for chunk in self.both(lambda twin, link=link: sorted(twin.flight.carried(link))):
                self.both(lambda twin, at=(chunk.sequence, chunk.offset): kept(twin, *at))
            for sequence in self.active:
                self.both(lambda twin, at=(link, sequence): twin.flight.waits_for(*at))
                self.both(lambda twin, at=(link, sequence): twin.flight.expects(*at, 64))
        for one, other in zip(*(twin.buffers for twin in self.twins), strict=True):
            assert one.view == other.view
            times = pytest.approx((one.sent, one.answered), abs=1e-6)
            assert (other.sent, other.answered) == times


class ManyTwins(Twins):
    """The same, longer."""


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=100, stateful_step_count=50, derandomize=True)
TestManyTwins = pytest.mark.extended("TestTwins")(pytest.mark.timeout(300)(ManyTwins.TestCase))
TestManyTwins.settings = settings(TestTwins.settings, max_examples=3000)
