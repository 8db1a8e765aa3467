"""A pool's keys: its own pair, and the allow-list, which is read again when its file changes.

A file may take any time to answer, on a network that is gone for one. So a thread of its own reads
it (`Reader`), and hands over the finished list; until then the one before holds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from reducer import keyfiles
from reducer.engine import allow_list
from reducer.errors import ConfigError
from reducer.keyfiles import KeyPair

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from reducer.engine.allow_list import AllowList

LOOK_S = 0.5  # between two looks at the file
_WAKE_S = 0.1  # how soon the reader notices that it is to look at once
LOG_S = 10.0  # one line about refusals at most in so much time, however many try

log = logging.getLogger(__name__)


class Keyring:
    """What a reducer shows, and whom it admits.

    Its threads share one, of which one thread alone may `refresh` it.

    Args:
        pair: the reducer's own keys.
        allowed: whom it admits.
        directory: where the allow-list is read again from; None if it does not change.

    Attributes:
        pair: as given.
        allowed: whom it admits now; another object after a change.
        changes: whether that can be.
    """

    def __init__(self, pair: KeyPair, allowed: AllowList, directory: Path | None = None) -> None:
        self.pair = pair
        self.allowed = allowed
        self.changes = directory is not None
        self._directory = directory
        self._next_look = 0.0
        self._forced = False
        self._read = self._seen = self._look()

    @classmethod
    def load(cls, directory: Path) -> Keyring:
        """Read a pool's directory.

        Raises:
            ConfigError: a file is missing or wrong; the message says which, and what to do.
        """
        pair = KeyPair(
            keyfiles.read_key(directory, keyfiles.POOL_PUBLIC),
            keyfiles.read_key(directory, keyfiles.POOL_SECRET),
        )
        allowed = allow_list.parse(keyfiles.read(directory, keyfiles.ALLOWED))
        log.info("keys on the allow-list: %d", len(allowed))
        return cls(pair, allowed, directory)

    def reload(self) -> None:
        """Have the next `refresh` read the file; any thread, or a signal handler, may call this."""
        self._forced = True

    def refresh(self, now: float) -> AllowList:
        """Return whom to admit, after a look at the file if it is time for one.

        A change counts when two looks have seen the same, so that a file which is just being
        written admits or shuts out nobody. If the file is wrong, what was read before holds.

        Args:
            now: seconds of a monotonic clock.
        """
        if self._directory is None or (now < self._next_look and not self._forced):
            return self.allowed
        if forced := self._forced:
            self._forced = False  # before it is read: a request from here on reads anew
        self._next_look = now + LOOK_S
        before, self._seen = self._seen, self._look()
        if forced or (self._seen != self._read and self._seen == before):
            self._read = self._seen
            self._parse(self._directory)
        return self.allowed

    def _parse(self, directory: Path) -> None:
        try:
            allowed = allow_list.parse(keyfiles.read(directory, keyfiles.ALLOWED))
        except ConfigError as error:
            log.error("the allow-list was not read again, the earlier one holds: %s", error)
            return
        if allowed != self.allowed:
            log.info("the allow-list was read again and has %d keys", len(allowed))
            self.allowed = allowed

    def _look(self) -> tuple[int, ...]:
        """Return what is another thing whenever the file is, also behind a symbolic link."""
        if self._directory is None:
            return ()
        try:
            found = os.stat(self._directory / keyfiles.ALLOWED)  # noqa: PTH116 (follows links)
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


class Reader(threading.Thread):
    """Refreshes a keyring until it is told to stop.

    Args:
        keyring: whose file it looks at.

    Attributes:
        failure: what has ended it besides `stop`, if anything has.
    """

    def __init__(self, keyring: Keyring) -> None:
        # Nobody waits for it: a file that does not answer may never let it go.
        super().__init__(name="reducer-keys", daemon=True)
        self._keyring = keyring
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Look at the file, again and again."""
        try:
            while not self._stopping.wait(_WAKE_S):
                self._keyring.refresh(time.monotonic())
        except BaseException as error:
            self.failure = error
            log.exception("the allow-list is not looked at any more: the reducer stops")
            raise

    def stop(self) -> None:
        """Have it end after its current look."""
        self._stopping.set()


class Refusals:
    """Says which connections were refused, at a limited rate."""

    def __init__(self) -> None:
        self._unlogged: Counter[str] = Counter()
        self._next_line = 0.0

    def note(self, reasons: Iterable[str], now: float | None = None) -> None:
        """Record refusals, each with its reason; call it often, also with none."""
        self._unlogged.update(reasons)
        now = time.monotonic() if now is None else now
        if self._unlogged and now >= self._next_line:
            self._next_line = now + LOG_S
            told = "; ".join(f"{count} {reason}" for reason, count in self._unlogged.items())
            log.warning("refused connections: %s", told)
            self._unlogged.clear()
