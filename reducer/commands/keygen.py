"""`reducer keygen`: makes key pairs for a pool and its jobs, as files to hand out.

DIR/pool is for the reducers, and each DIR/jobs/NAME for the workers of one job. Each of these
directories is one Kubernetes Secret as it is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reducer import keyfiles
from reducer.errors import ConfigError
from reducer.keyfiles import ALLOWED, JOB_NAME, JOB_SECRET, JOBS, POOL, POOL_PUBLIC, POOL_SECRET
from reducer.wire.job_names import MAX_OWNER_BYTES, is_owner
from reducer.zmtp._keys import make_pair

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_HEAD = "# JOB[,JOB...] PUBLICKEY, one key a line; * stands for any job\n"


def keygen(directory: Path, jobs: Sequence[str], *, rotate: bool = False) -> list[Path]:
    """Make what is missing: the pool's keys, and those of jobs.

    Args:
        directory: where; it is made if need be, for this user alone.
        jobs: names that keys are bound to.
        rotate: make new keys for jobs that have some; the old ones stay on the allow-list until
            their lines are removed.

    Returns:
        The directories that were made or changed.

    Raises:
        ConfigError: a name is wrong, or keys would be overwritten; nothing was written then.
    """
    for job in jobs:
        if not is_owner(job):
            raise ConfigError(
                f"a job's name has letters, digits, - and _, at most {MAX_OWNER_BYTES}, got {job!r}"
            )
        if (directory / JOBS / job).exists() and not rotate:
            raise ConfigError(
                f"{directory / JOBS / job} exists, and keys are not overwritten: remove it, choose "
                "another name with --job, or pass --rotate"
            )
    pool = directory / POOL
    done = [directory / JOBS / job for job in dict.fromkeys(jobs)]
    try:
        if not pool.exists():
            _make_pool(pool)
            done.insert(0, pool)
        public = keyfiles.read_key(pool, POOL_PUBLIC)
        lines = [_make_job(directory / JOBS / job, job, public) for job in dict.fromkeys(jobs)]
        listed = keyfiles.read(pool, ALLOWED)
        _write(pool / ALLOWED, "\n".join([listed, *lines]) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write below {directory}: {error.strerror}") from None
    return done


def _make_pool(pool: Path) -> None:
    _make_directory(pool)
    pair = make_pair()
    _write(pool / POOL_SECRET, pair.secret)
    _write(pool / POOL_PUBLIC, pair.public)
    _write(pool / ALLOWED, _HEAD)


def _make_job(home: Path, job: str, pool_public: str) -> str:
    """Make a job's directory and return its line of the allow-list."""
    _make_directory(home)
    pair = make_pair()
    _write(home / JOB_NAME, job)
    _write(home / POOL_PUBLIC, pool_public)
    _write(home / JOB_SECRET, pair.secret)
    return f"{job} {pair.public}"


def _make_directory(path: Path) -> None:
    for missing in reversed([path, *path.parents]):
        if not missing.exists():
            missing.mkdir(mode=0o700)


def _write(path: Path, text: str) -> None:
    # As a whole or not at all: a reducer may be reading.
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
