"""What an engine asks of the loop that owns it, which does so in the engine's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from reducer.engine.jobs import Job
    from reducer.wire.header import Buffer


class Send(NamedTuple):
    """Hand this message to that peer."""

    peer: bytes
    header: bytes
    payload: Buffer | np.ndarray | None


class MarkJoined(NamedTuple):
    """Trust a peer, which has joined; keep its connections when they break, if it `resumes`."""

    peer: bytes
    resumes: bool


class Attach(NamedTuple):
    """Have results for a member also go over a further stream, which ends with the member's own."""

    peer: bytes
    stream: bytes


class Resume(NamedTuple):
    """Have a connection go on over a fresh one, when the worker has read so many bytes of it."""

    peer: bytes
    fresh: bytes
    read: int


class GiveUp(NamedTuple):
    """End a connection if it has broken and waits to be resumed: another asks for its rank.

    An engine asks so with all that it does until that is decided.
    """

    peer: bytes


class Close(NamedTuple):
    """Close the connections of a peer that broke the protocol, once it could read why."""

    peer: bytes


class Serve(NamedTuple):
    """Take a job's healthy contributions without the engine from now on."""

    job: Job


class Dismiss(NamedTuple):
    """Leave every contribution to a job to the engine again."""

    job: Job


Action = Send | MarkJoined | Attach | Resume | GiveUp | Close | Serve | Dismiss
