"""What the plug-in asks Python for when NCCL makes a communicator: a job of its own at reducers.

NCCL's handles are all that ranks have in common before: each is made at one rank, and every rank
gets all of them, in rank order. So the job's name and its secret follow from them, and the address
of a reducer that a rank hosts is in that rank's.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import secrets
import struct
import sys
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import ConfigError, MismatchError, ReductionError
from reducer.units import is_loopback
from reducer.wire.constants import MAX_JOB_NAME_BYTES
from reducer.wire.header import fingerprint
from worker_client import config
from worker_client.client import bootstrap, compose, hosting, summary
from worker_client.communicators.placement import host_identity
from worker_client.runtime.credentials import load as load_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.server import Server
    from worker_client.communicators.communicator import FlatCommunicator
    from worker_client.config import WorkerConfig
    from worker_client.runtime.credentials import Keys

MAGIC = b"RDCOLL\0\1"
_HANDLE = struct.Struct("<8s16s?Q95s")
_TOTALS = struct.Struct("=QQ")  # all-reduces, and their bytes, as C counts them
# What calls of Python's go through, and NCCL's do not: each with the value that leaves it out.
_OF_PYTHON = {
    "fallback": "error",
    "on_rank_lost": "error",
    "join": False,
    "hierarchy": "off",
    "wire_dtype": "none",
}

log = logging.getLogger(__name__)


class CollectiveHandle(NamedTuple):
    """What a rank tells the others; 128 bytes of it travel.

    Attributes:
        nonce: which no other handle has.
        pool: whether it uses reducers of a pool.
        host: stands for its machine.
        address: of the reducer that it hosts, ``host:port``; "" without one.
    """

    nonce: bytes
    pool: bool
    host: int
    address: str

    def pack(self) -> bytes:
        """Return its bytes."""
        return _HANDLE.pack(MAGIC, self.nonce, self.pool, self.host, self.address.encode())

    @classmethod
    def unpack(cls, packed: bytes) -> CollectiveHandle:
        """Read one.

        Raises:
            ConfigError: another version of this plug-in has made it, or another plug-in.
        """
        magic, nonce, pool, host, address = _HANDLE.unpack(packed)
        if magic != MAGIC:
            raise ConfigError(
                "a rank has another plug-in for NCCL, or another version of this one: install the "
                "same everywhere, and set NCCL_NET_PLUGIN as `worker-client nccl` says at each rank"
            )
        return cls(nonce, pool, host, address.rstrip(b"\0").decode())

    @property
    def reducers(self) -> str:
        """Where its rank looks for reducers, in words."""
        pool, hosts = ["a pool"] * self.pool, ["one in every rank"] * bool(self.address)
        return " and ".join([*pool, *hosts])


class CollectiveListener:
    """A rank before it knows the others.

    Args:
        settings: of the job.
        way: this machine's address on the way to other ranks, as NCCL finds it.

    Attributes:
        handle: what the others are to know, 128 bytes.

    Raises:
        ConfigError: a setting is wrong, or does not go with NCCL.
    """

    def __init__(self, settings: WorkerConfig, way: str) -> None:
        self._settings = settings
        self._keys = load_keys(settings.keys)
        self._server: Server | None = None
        if bootstrap.hosts_reducer(settings, sys.maxsize):
            if settings.encrypt or settings.keys is not None:
                raise ConfigError(
                    "under NCCL reducers that ranks host do not encrypt: leave REDUCTION_ENCRYPT "
                    "and REDUCTION_KEYS out, or use a pool with keys and no REDUCTION_EMBEDDED"
                )
            self._server = hosting.reserve(settings.interface, way)
        address = "" if self._server is None else self._server.address
        host = fingerprint(host_identity())
        own = CollectiveHandle(secrets.token_bytes(16), bool(settings.servers), host, address)
        self.handle = own.pack()

    def connect(self, handles: bytes, rank: int, totals: memoryview) -> CollectiveClient:
        """Join the job; this listener is closed by its end, well or badly.

        Args:
            handles: of all ranks, in rank order.
            rank: this one's.
            totals: what goes through reducers, as C counts it: read at the end.

        Raises:
            ReductionError: the job cannot be joined; it says what to do.
        """
        try:
            return self._join(handles, rank, totals)
        except ReductionError as error:
            log.warning("NCCL's all-reduces do not go through reducers: %s", error)
            raise
        finally:
            self.close()

    def _join(self, handles: bytes, rank: int, totals: memoryview) -> CollectiveClient:
        packed = [handles[at : at + _HANDLE.size] for at in range(0, len(handles), _HANDLE.size)]
        ranks = [CollectiveHandle.unpack(one) for one in packed]
        _agree(ranks, rank)
        secret = hashlib.sha256(handles).digest()
        settings, server, hosted = self._settings, self._server, None
        if server is not None and bootstrap.hosts_reducer(settings, len(ranks)):
            self._server = None  # it has begun: the job stops it
            server.start(secret)
            hosted = hosting.Hosted(server, tuple(one.address for one in ranks), {}, secret)
        else:
            server = None
        try:
            run = hashlib.sha256(secret).hexdigest()[:16]  # which a pool may know
            spec = bootstrap.job_spec(
                settings,
                _job_name(settings, self._keys, run),
                (rank, len(ranks)),
                generation=settings.generation,
                run=run,
                hosted=hosted,
            )
            left = [] if server is None else [server.stop]
            communicator = compose.flat(settings, self._keys, server)(spec, *left)
            compose.around(settings, communicator, "nccl")  # which stops it if that fails
        except BaseException:
            if server is not None:
                server.stop()
            raise
        return CollectiveClient(communicator, settings.timeout, totals)

    def close(self) -> None:
        """Free the reducer that no job has; may be called again."""
        server, self._server = self._server, None
        if server is not None:
            server.start(secrets.token_bytes(hosting.SECRET_BYTES))  # for nobody
            server.stop()


class CollectiveClient:
    """What C makes all-reduces through.

    Attributes:
        calls: capsule of `struct core_calls`.
        timeout_s: of each all-reduce, seconds.
    """

    def __init__(
        self, communicator: FlatCommunicator, timeout_s: float, totals: memoryview
    ) -> None:
        self.calls = communicator.core.calls()
        self.timeout_s = timeout_s
        self._communicator = communicator
        self._totals = totals
        self._open = True
        spec = communicator.spec
        self._who = f"NCCL's node {spec.rank} of {spec.world_size}, job {spec.job}"
        summary.say(f"{self._who}: all-reduces go through {summary.reducers(spec)}")
        atexit.register(self.close)  # NCCL may destroy nothing at the end, or too late

    def close(self) -> None:
        """Leave the job, and say what has gone through it; may be called again."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        self._communicator.stop()
        all_reduces, nbytes = _TOTALS.unpack(self._totals)
        self._totals.release()  # the memory is C's
        communicator = self._communicator
        took = summary.measured(
            communicator.traffic, communicator.carries, communicator.session.flight.unowned
        )
        told = [f"{summary.count(all_reduces, 'all-reduce')}, {summary.size(nbytes)}{took}"]
        told += [summary.lost(communicator.counters.losses)]
        summary.say(f"{self._who}, ends: {', '.join(told)}")


def listen(way: str) -> CollectiveListener:
    """Begin a communicator; see `CollectiveListener`."""
    try:
        settings = config.load()
        check_settings(settings)
        return CollectiveListener(settings, way)
    except ReductionError as error:
        log.warning("NCCL's all-reduces do not go through reducers: %s", error)
        raise


def check_settings(settings: WorkerConfig) -> None:
    """Refuse settings that NCCL's all-reduces know nothing of.

    Raises:
        ConfigError: there is one; the message names it.
    """
    for name, value in _OF_PYTHON.items():
        if (given := getattr(settings, name)) != value:
            raise ConfigError(
                f"REDUCTION_{name.upper()}={given} is for jobs that Python's client makes, and "
                "NCCL's all-reduces do not go through it: leave it out"
            )


def _agree(ranks: Sequence[CollectiveHandle], rank: int) -> None:
    """Find out whether ranks would wait for each other at different places.

    Raises:
        MismatchError: another rank uses a pool and this one does not, or the like.
        ConfigError: a reducer that a rank hosts cannot be reached from other machines.
    """
    mine = ranks[rank]
    for other, theirs in enumerate(ranks):
        if theirs.reducers != mine.reducers:
            raise MismatchError.between(
                "start of the job",
                "REDUCTION_SERVERS",
                (other, theirs.reducers),
                (rank, mine.reducers),
                called="the reducers to use (REDUCTION_SERVERS, REDUCTION_EMBEDDED)",
            )
        if theirs.host != mine.host and theirs.address and is_loopback(theirs.address):
            raise ConfigError(
                f"rank {other}'s reducer is at {theirs.address}, which other machines cannot "
                "reach: set REDUCTION_INTERFACE there, or NCCL_SOCKET_IFNAME, to the network "
                "interface that leads to them"
            )


def _job_name(settings: WorkerConfig, keys: Keys, run: str) -> str:
    """Return a name that no other communicator has, below the job's own.

    Raises:
        ConfigError: it is too long.
    """
    base = settings.job or keys.job
    name = f"{base}/nccl-{run}" if base else f"nccl-{run}"
    if (over := len(name.encode()) - MAX_JOB_NAME_BYTES) > 0:
        raise ConfigError(f"REDUCTION_JOB: a job of NCCL's is called {name!r}: {over} bytes less")
    return name
