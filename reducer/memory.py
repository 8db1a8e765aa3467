"""How much memory a reducer's jobs may take: what was asked for, or what there is."""

from __future__ import annotations

import logging
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from reducer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reducer.config import ReducerConfig

OWN_BYTES = 64 << 20  # that a process takes before any job
THREAD_BYTES = 72 << 20  # of addresses: a stack, and what the C library sets aside for a thread
LEAST_BYTES = 1 << 20  # for the jobs of a thread

log = logging.getLogger(__name__)


def memory_limit(config: ReducerConfig, system: Path = Path("/")) -> int:
    """Return the bytes for all jobs: those of the configuration, or fewer where there are fewer.

    The kernel would end a process that takes more, in the middle of its jobs.

    Args:
        config: what was asked for.
        system: where ``proc`` and ``sys`` are.

    Raises:
        ConfigError: there is too little for any job.
    """
    available, where = min(_available(config.threads, system))
    most = (available - OWN_BYTES) * 8 // 9  # docs/security.md: an eighth comes on top
    asked = int(config.memory_limit)
    if asked <= most:
        return asked
    if most < LEAST_BYTES * config.threads:
        raise ConfigError(
            f"{where} {available} bytes of memory, and a reducer takes {OWN_BYTES} itself: give it "
            f"at least {OWN_BYTES + 2 * LEAST_BYTES * config.threads}"
        )
    level = logging.WARNING if "memory_limit" in config.model_fields_set else logging.INFO
    log.log(
        level,
        "jobs may take %d bytes instead of --memory-limit (REDUCTION_MEMORY_LIMIT), %d: %s %d",
        *(most, asked, where, available),
    )
    return most


def _available(threads: int, system: Path) -> Iterator[tuple[int, str]]:
    """Yield how many bytes this process may take, and who says so."""
    page = resource.getpagesize()
    yield os.sysconf("SC_PHYS_PAGES") * page, "this machine has"
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    own = system / "proc/self"
    with suppress(OSError):  # on Linux alone
        if most != resource.RLIM_INFINITY:
            taken = int((own / "statm").read_text(encoding="ascii").split()[0]) * page
            left = max(0, most - taken - threads * THREAD_BYTES)
            yield left, "RLIMIT_AS (ulimit -v) leaves"
        groups = (own / "cgroup").read_text(encoding="utf-8", errors="surrogateescape")
        for group in groups.rstrip("\n").split("\n"):
            _, kinds, path = group.split(":", 2)
            if "memory" in kinds.split(","):
                limit = _lowest(system / "sys/fs/cgroup" / kinds, path, "memory.limit_in_bytes")
            elif not kinds:  # of version 2
                limit = _lowest(system / "sys/fs/cgroup", path, "memory.max")
            else:
                continue
            yield limit, "this container (cgroup) may take"


def _lowest(root: Path, path: str, file: str) -> int:
    """Return the lowest limit of a group and those around it, as far as this process sees them."""
    group = root / path.strip("/")
    least = sys.maxsize
    for each in (group, *group.parents):
        with suppress(OSError, ValueError):  # it is elsewhere, seen from here; "max"
            if each.is_relative_to(root):
                least = min(least, int((each / file).read_text(encoding="ascii")))
    return least
