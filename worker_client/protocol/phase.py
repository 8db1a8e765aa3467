"""What a session is about, and what follows: its phases as a table.

The phase decides what becomes of a call that is submitted. Facts that come and go in any phase are
asked where they are known: which links are up, and whether another reducer has taken the place of
all (`ShardMap.adopted`).
"""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Phase of a session."""

    JOINING = auto()  # some reducer has not welcomed this worker yet, nor was it given up
    RECOVERING = auto()  # calls begin at once; something may be left to do about reducers
    STEADY = auto()  # calls begin at once; nothing is left to do
    AGREEING = auto()  # calls wait until the ranks have agreed which reducers to use
    GOING_ON_ELSEWHERE = (
        auto()
    )  # a rank is lost: calls fail here, and the ranks that are left go on
    HANDING_OVER = auto()  # no reducer is left: calls wait until nothing reads their buffers
    HANDED_OVER = auto()  # calls are brought to their end by other means
    CLOSED = auto()  # this worker has left the job


class Occurrence(Enum):
    """What may happen to a session."""

    JOINED = auto()  # every reducer has welcomed this worker, or was given up, here or elsewhere
    EVENT = auto()  # anything that may need recovery
    RECOVERED = auto()  # nothing is left to do
    ASKED = auto()  # the ranks' own question has begun
    ANSWERED = auto()  # it has ended, well or badly
    RANK_LOST = auto()  # in a job whose other ranks go on elsewhere
    NONE_LEFT = auto()  # no reducer is left, and something else takes the calls
    GIVEN = auto()  # it has them
    LEFT = auto()  # this worker has said goodbye


_P, _O = Phase, Occurrence

_ENDS = {
    _O.RANK_LOST: _P.GOING_ON_ELSEWHERE,
    _O.NONE_LEFT: _P.HANDING_OVER,
    _O.LEFT: _P.CLOSED,
}

# What says nothing of a phase leaves it as it is.
TRANSITIONS: dict[Phase, dict[Occurrence, Phase]] = {
    _P.JOINING: {_O.JOINED: _P.RECOVERING, _O.ASKED: _P.AGREEING, **_ENDS},
    _P.RECOVERING: {_O.RECOVERED: _P.STEADY, _O.ASKED: _P.AGREEING, **_ENDS},
    _P.STEADY: {_O.EVENT: _P.RECOVERING, _O.ASKED: _P.AGREEING, **_ENDS},
    _P.AGREEING: {_O.ANSWERED: _P.RECOVERING, **_ENDS},
    _P.GOING_ON_ELSEWHERE: {_O.NONE_LEFT: _P.HANDING_OVER, _O.LEFT: _P.CLOSED},
    _P.HANDING_OVER: {_O.GIVEN: _P.HANDED_OVER},
    _P.HANDED_OVER: {},
    _P.CLOSED: {},
}


def following(phase: Phase, occurrence: Occurrence) -> Phase:
    """Return the phase that follows when something happens."""
    return TRANSITIONS[phase].get(occurrence, phase)
