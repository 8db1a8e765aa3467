"""Waiting for what another thread or process brings about, and limits of time."""

import time

PATIENCE_S = 20.0  # a busy machine may take some
LOOK_S = 0.005


class TooLateError(AssertionError):
    """A limit of time was exceeded, which a busy machine may have caused.

    It is the only failure that `.ci/second_look.py` looks at again.
    """


def eventually(condition, patience_s=PATIENCE_S):
    """Wait until something is so.

    Raises:
        TooLateError: it never came to that.
    """
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() >= deadline:
            raise TooLateError(f"not within {patience_s:g} s")
        time.sleep(LOOK_S)


def within_s(limit_s, since, why=""):
    """Check that less than a limit has passed since a time of `time.monotonic`.

    Raises:
        TooLateError: as much has passed, or more.
    """
    took = time.monotonic() - since
    if took >= limit_s:
        raise TooLateError(f"took {took:.2f} s, limit {limit_s:g} s{why and f': {why}'}")
