"""Whether this process is a fork of another one, made by Python.

Every call asks that, and asking the system for the process's number takes as long as all else that
a call of a small tensor does.
"""

import os

_forks = 0


def forks() -> int:
    """Return how many forks lie between this process and the one that imported this module."""
    return _forks


def _count() -> None:
    global _forks  # noqa: PLW0603 (of the process, as forks are)
    _forks += 1


os.register_at_fork(after_in_child=_count)
