"""How much of a reducer one job, and all of them, may take besides memory (sans I/O)."""

from __future__ import annotations

import sys
from typing import NamedTuple

from reducer.wire.constants import MAX_CHUNK_BYTES, MAX_WORLD_SIZE

TAKEN_PER_LOOK = 64  # messages, at least, between two looks of the guard; from peers in turn


class ConnectionLimits(NamedTuple):
    """What `Guard` allows connections.

    Attributes:
        max_connections: how many there may be, but for further streams.
        hello_s: time that one has to become a member of a job.
        max_open: how many there may be with these.
        port_bytes: of the buffer of the switch's port that leads here; 0 if that is not known.
    """

    max_connections: int
    hello_s: float
    max_open: int = sys.maxsize
    port_bytes: int = 0


class Limits(NamedTuple):
    """What `Members` admits; the settings of the same names are in `reducer.config`.

    Attributes:
        max_jobs_per_key: how many jobs of one key there may be.
        job_memory_limit: bytes that one job may reserve, or all jobs of one key; all there are if
            None.
        max_rounds: all-reduces that one job may have here, or all jobs of one key.
        max_connections_per_key: connections of members that may have come with one key; any number
            if None. A key that has half of them gets no further streams.
        max_streams: connections of members from which on links get no further streams; any number
            if None.
    """

    max_jobs: int = 256
    max_jobs_per_key: int = 64
    max_ranks: int = MAX_WORLD_SIZE
    max_chunk_bytes: int = MAX_CHUNK_BYTES
    job_memory_limit: int | None = None
    max_rounds: int = 1 << 17
    max_connections_per_key: int | None = None
    max_streams: int | None = None


NO_LIMITS = Limits()  # but the protocol's own, and of jobs
