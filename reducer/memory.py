"""How much memory a reducer's jobs may take: what was asked for, or what there is."""

from __future__ import annotations

import logging
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reducer.config import ReducerConfig

OWN_BYTES = 64 << 20  # that a process takes before any job
_CGROUPS = Path("/sys/fs/cgroup")

log = logging.getLogger(__name__)


def memory_limit(config: ReducerConfig) -> int:
    """Return the bytes for all jobs: those of the configuration, or fewer where there are fewer.

    The kernel would end a process that takes more, in the middle of its jobs.
    """
    available, where = min(_memory_available())
    most = max(1, (available - OWN_BYTES) * 8 // 9)  # docs/security.md: an eighth on top of it
    asked = int(config.memory_limit)
    if asked <= most:
        return asked
    level = logging.WARNING if "memory_limit" in config.model_fields_set else logging.INFO
    log.log(
        level,
        "jobs may take %d bytes instead of --memory-limit (REDUCTION_MEMORY_LIMIT), %d: %s %d",
        *(most, asked, where, available),
    )
    return most


def _memory_available() -> Iterator[tuple[int, str]]:
    """Yield how many bytes this process may take, and who says so."""
    page = resource.getpagesize()
    yield os.sysconf("SC_PHYS_PAGES") * page, "this machine has"
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError):  # on Linux alone
        if most != resource.RLIM_INFINITY:
            taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * page
            yield max(0, most - taken), "RLIMIT_AS (ulimit -v) leaves"
        for group in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, path = group.split(":", 2)
            if kinds in {"", "memory"}:  # of version 2, of version 1
                file = "memory.limit_in_bytes" if kinds else "memory.max"
                yield (
                    _cgroup_limit(_CGROUPS / kinds, path, file),
                    "this container (cgroup) may take",
                )


def _cgroup_limit(root: Path, path: str, file: str) -> int:
    """Return the lowest limit of a group and those around it, as far as this process sees them."""
    group = root / path.strip("/")
    least = sys.maxsize
    for each in (group, *group.parents):
        with suppress(OSError, ValueError):  # it is elsewhere, seen from here; "max"
            if each.is_relative_to(root):
                least = min(least, int((each / file).read_text(encoding="ascii")))
    return least
