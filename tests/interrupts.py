"""Interrupts at any line of the worker's code, as a signal handler that raises makes them."""

import linecache
import sys
from pathlib import Path

import worker_client


class BoomError(Exception):
    """What a signal handler raises."""


def boom_at(line, *, after, never_in):
    """Return what raises BoomError, as a trace function, at a line of the worker's code.

    Args:
        line: number of an executed line, from 1 for the first one of the function `after`.
        after: name of a function; an interrupt before it cannot be told from no call at all.
        never_in: a function that is not interrupted.
    """
    folder = str(Path(worker_client.__file__).parent)
    lines = -1
    entered = set()

    def trace(frame, event, _):
        nonlocal lines
        code = frame.f_code
        if not code.co_filename.startswith(folder) or code.co_name == never_in:
            return None
        if code.co_name == after:
            lines = max(lines, 0)
        if event == "line" and lines >= 0:
            here = frame, frame.f_lineno
            source = linecache.getline(code.co_filename, frame.f_lineno).lstrip()
            if source.startswith("with ") and here in entered:
                return trace  # it is left: no handler runs before its lock is released
            entered.add(here)
            lines += 1
            if lines == line:
                sys.settrace(None)
                raise BoomError
        return trace

    return trace
