"""Failpoints: places at which a test makes a real process die, stop, be slow or lose a message.

``python -m torture.failpoints FAILPOINTS MODULE ...`` runs a module with them, such as `reducer`.
They stand around the objects of the product, of which it knows nothing; the compiled loops alone
have places in their own code, in a build in place and in no wheel (`failpoints.h`). Workers and
reducers share one list, because a worker may host a reducer.
"""

from __future__ import annotations

import ctypes
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from itertools import count

from reducer.units import seconds
from reducer.wire.constants import HEADER_BYTES
from reducer.wire.header import PREFIX, Buffer

LEAVE_S = 0.05  # for libzmq's threads to send what they were handed, before the process ends
# The compiled loops, each with a table of its own.
REDUCER_LOOP, WORKER_LOOP = "reducer.runtime._loop", "worker_client.runtime._loop"


class Place(IntEnum):
    """Where something can be made to happen; the same as in `failpoints.h`."""

    REDUCER_RECEIVED = 0  # a contribution, which was not placed yet
    REDUCER_PLACED = 1  # a contribution is in its slot
    REDUCER_BEFORE_SUM = 2  # the slot is complete
    REDUCER_AFTER_SUM = 3  # no result was sent yet
    REDUCER_BETWEEN_RESULTS = 4  # the first result of a chunk was sent, the second is next
    REDUCER_AFTER_RESULTS = 5  # the last one of a chunk was sent
    REDUCER_WELCOME = 6  # a WELCOME is about to be sent
    REDUCER_TICK = 7  # the engine is about to see the clock
    WORKER_BEFORE_SEND = 8  # a contribution is about to be handed to libzmq
    WORKER_AFTER_SEND = 9  # it was
    WORKER_RECEIVED = 10  # a result, which was not copied yet
    WORKER_COPIED = 11  # a result is in its buffer
    WORKER_COMPLETED = 12  # so are all of an all-reduce, which its caller does not know yet
    WORKER_HELLO = 13  # a HELLO is about to be sent

    @property
    def text(self) -> str:
        """How it is written: ``reducer.before_sum``."""
        return self.name.lower().replace("_", ".", 1)


class Action(IntEnum):
    """What happens there; the same as in `failpoints.h`."""

    KILL = 1
    STOP = 2
    DELAY = 3
    DROP = 4


DROPPING = (
    Place.REDUCER_RECEIVED,
    Place.REDUCER_AFTER_SUM,  # all results of the chunk
    Place.REDUCER_BETWEEN_RESULTS,  # the second
    Place.REDUCER_WELCOME,
    Place.WORKER_BEFORE_SEND,
    Place.WORKER_RECEIVED,
    Place.WORKER_HELLO,
)
_AFTER_A_SEND = {
    Place.REDUCER_BETWEEN_RESULTS,
    Place.REDUCER_AFTER_RESULTS,
    Place.WORKER_AFTER_SEND,
}
_SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP}
_PLACES = {place.text: place for place in Place}
_WRITTEN = re.compile(r"(?P<place>[^=@]*)=(?P<action>[^=@]*)(@(?P<at>[1-9][0-9]*))?")
_ACTION = re.compile(r"kill|stop|drop|(?P<delay>delay):(?P<duration>[^:]+)")


@dataclass(frozen=True)
class Failpoint:
    """Something that happens at a place.

    Attributes:
        place, action: where, and what.
        delay_s: time to wait there before.
        at: the pass, from 1, of all threads of a process, at which it does; 0 for every one.
    """

    place: Place
    action: Action
    delay_s: float
    at: int

    def __str__(self) -> str:
        at = f"@{self.at}" if self.at else ""
        return f"{self.place.text}={self.action.name.lower()}{at}"


def parse(text: str) -> tuple[Failpoint, ...]:
    """Read failpoints such as ``reducer.before_sum=kill@3,worker.received=delay:50ms``.

    Raises:
        ValueError: a place or an action is none; the message lists those that there are.
    """
    found = tuple(_parse_one(part.strip()) for part in text.split(",") if part.strip())
    places = [failpoint.place for failpoint in found]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"{place.text} is given twice")
    return found


def _parse_one(text: str) -> Failpoint:
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise ValueError(f"write NAME=ACTION or NAME=ACTION@N, with N from 1, not {text!r}")
    place = _PLACES.get(match["place"])
    if place is None:
        raise ValueError(f"no failpoint is called {match['place']!r}: known are {_list(Place)}")
    said = _ACTION.fullmatch(match["action"])
    if said is None:
        raise ValueError(
            f"{match['action']!r} is no action of {place.text}: known are kill, stop, delay:50ms "
            "and drop"
        )
    action = Action[(said["delay"] or said[0]).upper()]
    if action is Action.DROP and place not in DROPPING:
        raise ValueError(f"there is nothing to drop at {place.text}, only at {_list(DROPPING)}")
    delay_s = LEAVE_S if action in _SIGNALS and place in _AFTER_A_SEND else 0.0
    if said["delay"]:
        delay_s = seconds(said["duration"])
    at = int(match["at"] or (action in _SIGNALS))  # one can die only once, but be slow every time
    return Failpoint(place, action, delay_s, at)


def _list(places: Sequence[Place] | type[Place]) -> str:
    return ", ".join(place.text for place in places)


def arm(failpoints: Sequence[Failpoint]) -> Callable[[Place], bool]:
    """Return what is called at a place, and says whether what is at hand there is to be dropped."""
    armed = {failpoint.place: (failpoint, count(1)) for failpoint in failpoints}

    def hit(place: Place) -> bool:
        if place not in armed:
            return False
        failpoint, passes = armed[place]
        if next(passes) != failpoint.at and failpoint.at:
            return False
        time.sleep(failpoint.delay_s)
        if failpoint.action in _SIGNALS:
            # To this thread: one that is sent to the process may let it run on before it stops.
            signal.raise_signal(_SIGNALS[failpoint.action])
        return failpoint.action is Action.DROP

    return hit


def has_failpoints(module: str) -> bool:
    """Whether a compiled loop was built with failpoints."""
    return hasattr(_library(module), "failpoint_arm")


def _library(module: str) -> ctypes.CDLL:
    return ctypes.CDLL(import_module(module).__file__)


def arm_module(module: str, failpoints: Sequence[Failpoint]) -> Callable[[Place], bool]:
    """Fill in the table of a compiled loop, and return what passes it, as `arm` does.

    Raises:
        RuntimeError: the module was built without failpoints.
    """
    if not has_failpoints(module):
        raise RuntimeError(f"{module} has no failpoints: build it in place (pip install -e .)")
    table = _library(module)
    table.failpoint_pass.restype = ctypes.c_bool
    table.failpoints_disarm()
    for each in failpoints:
        delay_ns, at = ctypes.c_uint64(int(each.delay_s * 1e9)), ctypes.c_uint64(each.at)
        table.failpoint_arm(int(each.place), int(each.action), delay_ns, at)
    return lambda place: bool(table.failpoint_pass(int(place)))


def message_type(header: Buffer) -> int:
    """Return the type of the message that a frame begins; 0 if the frame is no header."""
    if len(header) != HEADER_BYTES:
        return 0
    _, _, found = PREFIX.unpack_from(header)
    return int(found)
