"""Who may say what, and when: the state of one link as a table (`docs/protocol.md`, section 5).

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

    NOT_JOINED = "NOT_JOINED"
    JOINING = "JOINING"
    MEMBER = "MEMBER"
    DRAINING = "DRAINING"
    LEFT = "LEFT"


_S = LinkState

# What members say in any order.
_WORKERS = (M.CONTRIBUTION, M.ABORT, M.RETAINED, M.SHARD_MAP, M.STRAGGLERS, M.CREDIT)
_REDUCERS = (M.RESULT, M.ERROR, M.PING, M.RETAINED, M.SHARD_MAP, M.STRAGGLERS, M.CREDIT)


def _unchanged_by(state: LinkState, *messages: M) -> dict[M, LinkState]:
    return dict.fromkeys(messages, state)


TRANSITIONS: dict[LinkState, dict[Role, dict[M, LinkState]]] = {
    _S.NOT_JOINED: {
        Role.WORKER: {M.HELLO: _S.JOINING},
        Role.REDUCER: {},
    },
    _S.JOINING: {
        Role.WORKER: {},
        Role.REDUCER: {
            M.WELCOME: _S.MEMBER,
            M.CHALLENGE: _S.NOT_JOINED,
            M.ERROR: _S.NOT_JOINED,
        },
    },
    _S.MEMBER: {
        Role.WORKER: {**_unchanged_by(_S.MEMBER, *_WORKERS), M.GOODBYE: _S.LEFT},
        Role.REDUCER: {**_unchanged_by(_S.MEMBER, *_REDUCERS), M.GOODBYE: _S.DRAINING},
    },
    _S.DRAINING: {
        Role.WORKER: {**_unchanged_by(_S.DRAINING, *_WORKERS), M.GOODBYE: _S.LEFT},
        Role.REDUCER: _unchanged_by(_S.DRAINING, *_REDUCERS),
    },
    _S.LEFT: {
        Role.WORKER: {},
        Role.REDUCER: _unchanged_by(_S.LEFT, *_REDUCERS, M.GOODBYE),
    },
}


def after(state: LinkState, sender: Role, message: M) -> LinkState | None:
    """Return the state that follows when `sender` says `message`, or None if it may not."""
    return TRANSITIONS[state][sender].get(message)
