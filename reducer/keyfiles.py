"""Files that hold keys, one each: as `reducer keygen` writes them, or Kubernetes mounts a Secret.

A pool's directory has `POOL_SECRET`, `POOL_PUBLIC` and `ALLOWED`; a worker's has `JOB_SECRET`,
`JOB_NAME` and `POOL_PUBLIC`. Both packages read them.
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reducer.errors import ConfigError
from reducer.zmtp import z85

if TYPE_CHECKING:
    from pathlib import Path

POOL_SECRET = "pool.secret"  # noqa: S105 (names of files)
POOL_PUBLIC = "pool.public"
ALLOWED = "allowed"
JOB_SECRET = "job.secret"  # noqa: S105
JOB_NAME = "job.name"
POOL, JOBS = "pool", "jobs"  # directories that `reducer keygen` makes
_NAMED_BY = "REDUCTION_KEYS, or --keys of `reducer serve`, names the directory of keys"
_MOST_BYTES = 1 << 20  # far more than any of them has

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyPair:
    """A key pair of CURVE, in Z85; neither part shows in logs by accident."""

    public: str = field(repr=False)
    secret: str = field(repr=False)


def is_key(text: str) -> bool:
    """Whether this is a key in Z85."""
    try:
        z85.decode(text)
    except ValueError:
        return False
    return True


def read(directory: Path, name: str) -> str:
    """Return a file's text, without spaces around it.

    Raises:
        ConfigError: it is missing, cannot be read, or others than its owner may change it.
    """
    path = directory / name
    try:
        with open(path, encoding="utf-8", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())  # of what is read, whatever the name leads to by now
            _check_modes(directory, path, found.st_mode)
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                raise ConfigError(
                    f"{path} is no regular file of at most {_MOST_BYTES} bytes: it must hold keys, "
                    "as text"
                )
            return file.read(_MOST_BYTES).strip()
    except FileNotFoundError:
        place = directory.absolute()
        missing = f"{name} in {place}" if directory.is_dir() else f"directory {place}"
        raise ConfigError(f"there is no {missing} ({_NAMED_BY}): {_advice(directory)}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{path} cannot be read ({why}): it must be readable for user {os.getuid()}; of a "
            "Kubernetes Secret set defaultMode: 0440 and the pod's fsGroup"
        ) from None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the other end, should it be a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def read_key(directory: Path, name: str) -> str:
    """Return the key that a file holds; raises as `read`, or if it holds none."""
    key = read(directory, name)
    if not is_key(key):
        raise ConfigError(f"{directory / name} holds no key: 40 characters, as made by keygen")
    return key


def _check_modes(directory: Path, path: Path, mode: int) -> None:
    # A mounted Secret's directory is open to all, with the sticky bit, in a mount of its own, and
    # its files are by default readable for everyone in the container.
    mounted = (directory / "..data").is_symlink()
    folder = directory.stat().st_mode
    guarded = folder & stat.S_ISVTX or mounted  # each file is its owner's to replace
    changed = mode | (0 if guarded else folder)
    if changed & (stat.S_IWGRP | stat.S_IWOTH):
        who = "anybody on this machine" if changed & stat.S_IWOTH else "its group"
        raise ConfigError(
            f"{who} can change {path}: run chmod 700 {directory} and chmod 600 {path}"
        )
    if mode & stat.S_IROTH and path.name.endswith(".secret") and not mounted:
        log.warning("anybody on this machine can read %s: run chmod 600 on it", path)


def _advice(directory: Path) -> str:
    if (directory / POOL).is_dir():
        return (
            f"give a pool {directory / POOL}, and a job's workers their directory below "
            f"{directory / JOBS}"
        )
    return "run `reducer keygen DIR`, and give a pool DIR/pool, and a job's workers DIR/jobs/NAME"
