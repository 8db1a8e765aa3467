"""Interrupts at any line of the worker's code, as a signal handler that raises makes them."""

import linecache
import sys
from pathlib import Path

import worker_client


class BoomError(Exception):
    """What a signal handler raises."""


def boom_at(line, *, after, never_in):
    """Return what raises BoomError, as a trace function, at a line of the worker's code.

    Executed lines are counted from 1 for the first one of the function `after`: an interrupt before
    it cannot be told from no call at all. The function `never_in` is not interrupted.
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
        here = frame, frame.f_lineno
        if event != "line" or lines < 0:
            return trace
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
