"""Handlers that hear what a package logs, in programs whose logging is not ours to decide.

Python shows warnings on standard error as long as a logger has no handler (`logging.lastResort`).
A timeline must not end that, nor pass for the set-up of a program that has none.
"""

from __future__ import annotations

import logging


class Listener(logging.Handler):
    """Hears records; they are shown, or not, as if this handler did not exist."""

    def take(self, record: logging.LogRecord, text: str) -> None:
        """Take a record, whose message is `text`."""
        raise NotImplementedError

    def emit(self, record: logging.LogRecord) -> None:
        """Hear a record, and show it if Python would without listeners."""
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 (whatever shows the record reports its wrong format)
            text = None
        if text is not None:
            self.take(record, text)
        found, last = _handlers(logging.getLogger(record.name)), logging.lastResort
        alone = all(isinstance(one, Listener) for one in found)
        if alone and found[:1] == [self] and last is not None and record.levelno >= last.level:
            last.handle(record)


def program_shows(logger: logging.Logger) -> bool:
    """Return whether the program has set up a handler that this logger's records reach."""
    return not all(isinstance(one, Listener) for one in _handlers(logger))


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    found: list[logging.Handler] = []
    above: logging.Logger | None = logger
    while above is not None:
        found += above.handlers
        above = above.parent if above.propagate else None
    return found
