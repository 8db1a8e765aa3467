"""An engine with compiled slots and one with their oracle: their answers must be the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast
from unittest.mock import patch

from fuzz.source import check
from reducer import kernels
from reducer.engine import _slots, membership
from reducer.engine.actions import Close, Send
from reducer.engine.admission import ReducerIdentity
from reducer.engine.engine import Engine
from reducer.engine.limits import NO_LIMITS, Limits
from reducer.runtime._loop import Core
from reducer.wire.constants import COMPILED_FEATURES, NONCE_DIGITS, MessageType
from reducer.wire.header import Header
from tests.twins import slots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.engine.actions import Action
    from reducer.engine.jobs import Job
    from reducer.engine.slots import SlotsModule

Kind = TypeVar("Kind")
Answers = dict[bytes, list[tuple[bytes, bytes]]]  # by peer: headers and payloads
NAMES = ("plain", "compiled")  # the first one is looked into


class Twin:
    """One engine and, with compiled slots, the loop's part before it.

    Attributes:
        taken: messages that never reached the engine.
        others: what the engine has asked for last, but to send.
    """

    def __init__(self, name: str, memory_limit: int, limits: Limits = NO_LIMITS) -> None:
        plain = name == "plain"
        self.name = name
        self.taken = 0
        self.others: list[Action] = []
        self._tickets = 0
        identity = ReducerIdentity("1", "here:1", features=COMPILED_FEATURES)
        self.engine = Engine(
            kernels.select("numpy" if plain else None),
            cast("SlotsModule", slots) if plain else _slots,
            identity,
            memory_limit=memory_limit,
            limits=limits,
        )
        self._core = None if plain else Core(self.engine)

    def receive(self, peer: bytes, frame: bytes, payload: bytes) -> Sequence[Action]:
        """Take a message as a reducer's thread does."""
        if self._core is not None:
            sends = self._core.offer(peer, frame, payload)
            if sends is not None:
                self.taken += 1
                return sends
        return self.engine.receive(peer, frame, payload)

    def perform(self, actions: Sequence[Action]) -> list[Send]:
        """Do what is the loop's, and return what is to be sent."""
        self.others = [action for action in actions if not isinstance(action, Send)]
        for action in self.others:
            if self._core is not None and not isinstance(action, Close):
                self._core.perform(action)
        return [action for action in actions if isinstance(action, Send)]

    def asked_for(self, kind: type[Kind]) -> list[Kind]:
        """Return what the engine has asked for last of a kind."""
        return [action for action in self.others if isinstance(action, kind)]

    def ticket(self) -> str:
        """Return another one each time, but the same as the other twins."""
        self._tickets += 1
        return f"{self._tickets:0{NONCE_DIGITS}x}"


class Twins:
    """Both engines, in step."""

    def __init__(self, memory_limit: int, limits: Limits = NO_LIMITS) -> None:
        self.all = [Twin(name, memory_limit, limits) for name in NAMES]

    @property
    def plain(self) -> Engine:
        """The one that is looked into."""
        return self.all[0].engine

    def do(self, act: Callable[[Twin], Sequence[Action]]) -> Answers:
        """Let each do the same; they must give the same answers."""
        answers, *others = [self._act(twin, act) for twin in self.all]
        for twin, other in zip(self.all[1:], others, strict=True):
            check(_lagging(other, answers), f"plain answers {answers}, {twin.name} {other}")
            self._compare(twin.engine)
        return answers

    @staticmethod
    def _act(twin: Twin, act: Callable[[Twin], Sequence[Action]]) -> Answers:
        with patch.object(membership, "nonce", twin.ticket):
            return _by_peer(twin.perform(act(twin)))

    def asked_for(self, kind: type[Kind]) -> list[Kind]:
        """Return what the engines have asked for last of a kind, the same of each."""
        found, *others = [twin.asked_for(kind) for twin in self.all]
        check(all(other == found for other in others), f"they ask for {found}, not {others}")
        return found

    def _compare(self, engine: Engine) -> None:
        plain = self.plain
        check(engine.counters == plain.counters, f"{engine.counters} is {plain.counters}")
        check(engine.held() == plain.held(), f"{engine.held()} bytes are {plain.held()}")
        state, expected = ([_state(job) for job in each.jobs] for each in (engine, plain))
        check(state == expected, f"jobs, watermarks, rounds and memory {state} are {expected}")


def _state(job: Job) -> tuple[object, ...]:
    return job.key, job.reached(), sorted(job.rounds), job.reserved, job.rounds.used()


def _lagging(answers: Answers, expected: Answers) -> bool:
    """Whether answers are the expected ones, but for the watermark of results.

    The compiled loop learns what every rank has finished when it takes a contribution itself. What
    it says until then is no less true.
    """
    if answers == expected:
        return True
    counts = {peer: len(messages) for peer, messages in answers.items()}
    if counts != {peer: len(messages) for peer, messages in expected.items()}:
        return False
    for peer, messages in answers.items():
        both = zip(messages, expected[peer], strict=True)
        for (frame, payload), (other_frame, other_payload) in both:
            header, other = Header.unpack(frame), Header.unpack(other_frame)
            behind = header.type is MessageType.RESULT and header.watermark <= other.watermark
            same = other._replace(watermark=header.watermark) if behind else other
            if header != same or payload != other_payload:
                return False
    return True


def _by_peer(sends: list[Send]) -> Answers:
    """Sort what is sent at one time: its order is nothing that anybody relies on."""
    answers: Answers = {}
    for peer, header, payload in sends:
        answers.setdefault(peer, []).append((header, b"" if payload is None else bytes(payload)))
    for messages in answers.values():
        messages.sort(key=lambda message: (message[0][:32], message[0][40:], message[1]))
    return answers
