"""A worker's keys: which reducer it expects at an address, and what it shows there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reducer import keyfiles
from reducer.errors import AuthError, ConfigError
from reducer.wire.job_names import MAX_OWNER_BYTES, is_owner

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """What a connection takes; nothing of it shows in logs by accident.

    Attributes:
        server: public key of the reducer.
        secret: of this worker; its public one follows from it.
    """

    server: str = field(repr=False)
    secret: str = field(repr=False)


@dataclass(frozen=True)
class Keys:
    """The keys of one client.

    Attributes:
        job: name that the pool binds them to; empty if there is no pool with keys.
        pool: for the pool's reducers, None if these have no keys.
        hosts: for the addresses of reducers that ranks host.
    """

    job: str = ""
    pool: Curve | None = None
    hosts: Mapping[str, Curve | None] = field(default_factory=dict)

    def at(self, address: str) -> Curve | None:
        """Return what to use at an address, ``host:port``; None for no keys."""
        return self.hosts.get(address, self.pool)


def load(directory: Path | None) -> Keys:
    """Read a job's directory, as `reducer keygen` makes it; of None, no keys.

    Raises:
        ConfigError: a file is missing or wrong; the message says which, and what to do.
    """
    if directory is None:
        return Keys()
    job = keyfiles.read(directory, keyfiles.JOB_NAME)
    if not is_owner(job):
        raise ConfigError(
            f"{directory / keyfiles.JOB_NAME} must hold the job's name: letters, digits, - and _, "
            f"at most {MAX_OWNER_BYTES}"
        )
    server = keyfiles.read_key(directory, keyfiles.POOL_PUBLIC)
    secret = keyfiles.read_key(directory, keyfiles.JOB_SECRET)
    return Keys(job, Curve(server, secret))


def unknown(address: str) -> AuthError:
    """Say that a reducer does not know this worker's key."""
    return AuthError(
        f"reducer {address} refuses this worker's key: it is not on the pool's allow-list, or was "
        "revoked. Set REDUCTION_KEYS to a directory whose key is on it, or add its line there"
    )


def mechanism_differs(address: str, *, keyed: bool) -> AuthError:
    """Say that one of both sides has keys, and the other has none."""
    if keyed:
        return AuthError(
            f"reducer {address} has no keys, and this worker has: start it with --keys, or leave "
            "REDUCTION_KEYS out if the network is private"
        )
    return AuthError(
        f"reducer {address} demands a key, and this worker has none: set REDUCTION_KEYS to the "
        "directory of your job's keys, DIR/jobs/NAME of `reducer keygen DIR`"
    )


def guess(address: str, mechanism: str, *, keyed: bool) -> AuthError | None:
    """Say why a reducer ends handshakes, if that is for want of the right key.

    Args:
        address: of the reducer.
        mechanism: what it says of itself in the greeting: ``NULL`` or ``CURVE``.
        keyed: whether we use keys there.
    """
    if mechanism == "CURVE" and keyed:
        return AuthError(
            f"reducer {address} is not of the pool that this worker's keys are for: its key is not "
            f"the one in {keyfiles.POOL_PUBLIC} of REDUCTION_KEYS. Set REDUCTION_KEYS to the "
            "job's directory that was made with this pool's keys"
        )
    if (mechanism == "CURVE") != keyed and mechanism in {"CURVE", "NULL"}:
        return mechanism_differs(address, keyed=keyed)
    return None
