"""One rank's process of `torture.guarantee`: takes part in one life of the job after the other.

It is forked from a process that has imported everything (`torture.guarantee_job`).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import random
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from torture.guarantee_life import Life, Part
from torture.guarantee_signals import Clock, Interrupter, enter

TELL_S = 0.1


class Rank:
    """A rank's process: lives, one after the other."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._told: queue.SimpleQueue[Part] = queue.SimpleQueue()
        self._clock = Clock()
        self._interrupter = Interrupter()
        self._life: Life | None = None
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        threading.Thread(target=self._report, name="reporter", daemon=True).start()

    def run(self) -> None:
        """Take one part after the other."""
        while True:
            part = self._told.get()
            life = self._life = Life(part, self._tell, self._clock, self._interrupter)
            try:
                life.live()
            except BaseException:  # noqa: BLE001 (told)
                life.find("untyped error", None, traceback.format_exc())
                life.over = "a finding"
            self._life = None
            self._tell("progress", life.progress())
            self._tell("over", {"life": part.life, "why": life.over or "as told"})

    def _listen(self) -> None:
        while True:
            try:
                what, said = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # the parent is gone
            life = self._life
            if what == "begin":
                self._told.put(said)
            elif life is not None and life.part.life == said["life"]:
                life.until.update(said.get("until", {}))
                if what == "stop":
                    life.stop.set()

    def _report(self) -> None:
        while True:
            time.sleep(TELL_S)
            if (life := self._life) is not None:
                self._tell("progress", life.progress())

    def _tell(self, what: str, said: dict[str, Any]) -> None:
        with self._sending, suppress(BrokenPipeError):
            self._connection.send((what, said))


def main(connection: Connection, words: str, namespace: str) -> None:
    """Be a rank's process; what it would write to standard error goes to the file `words`."""
    if namespace:
        enter(namespace)
    with open(words, "ab", buffering=0) as file:  # noqa: PTH123
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    logging.getLogger("worker_client").setLevel(logging.WARNING)
    random.seed()
    Rank(connection).run()
