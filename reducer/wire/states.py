"""Who may say what, and when: the state of one link as a table (`README.md`, section 5).

Both ends step the same table with every message, sent or received.
"""

from __future__ import annotations

from enum import Enum

from reducer.wire.constants import MessageType as M


class Role(Enum):
    """Which end of a link speaks."""

    WORKER = "worker"
    REDUCER = "reducer"


class LinkState(Enum):
    """State of a worker's connection to a reducer."""

    STRANGER = "STRANGER"
    JOINING = "JOINING"
    MEMBER = "MEMBER"
    DRAINING = "DRAINING"
    LEFT = "LEFT"


_S = LinkState

TRANSITIONS: dict[LinkState, dict[Role, dict[M, LinkState]]] = {
    _S.STRANGER: {
        Role.WORKER: {M.HELLO: _S.JOINING},
        Role.REDUCER: {},
    },
    _S.JOINING: {
        Role.WORKER: {},
        Role.REDUCER: {M.WELCOME: _S.MEMBER, M.ERROR: _S.STRANGER},
    },
    _S.MEMBER: {
        Role.WORKER: {M.CONTRIBUTION: _S.MEMBER, M.ABORT: _S.MEMBER, M.GOODBYE: _S.LEFT},
        Role.REDUCER: {
            M.RESULT: _S.MEMBER,
            M.ERROR: _S.MEMBER,
            M.PING: _S.MEMBER,
            M.GOODBYE: _S.DRAINING,
        },
    },
    _S.DRAINING: {
        Role.WORKER: {M.CONTRIBUTION: _S.DRAINING, M.ABORT: _S.DRAINING, M.GOODBYE: _S.LEFT},
        Role.REDUCER: {M.RESULT: _S.DRAINING, M.ERROR: _S.DRAINING, M.PING: _S.DRAINING},
    },
    _S.LEFT: {
        Role.WORKER: {},
        Role.REDUCER: {
            M.RESULT: _S.LEFT,
            M.ERROR: _S.LEFT,
            M.PING: _S.LEFT,
            M.GOODBYE: _S.LEFT,
        },
    },
}


def after(state: LinkState, sender: Role, message: M) -> LinkState | None:
    """Return the state that follows when `sender` says `message`, or None if it may not."""
    return TRANSITIONS[state][sender].get(message)
