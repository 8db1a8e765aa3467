"""Threads on a virtual clock, in the place of `threading`, `time` and `queue`: one runs at a time.

A thread runs until it waits, and now and then until it takes a lock; who goes on then is a matter
of the clock and the seed, so threads replay. The clock's events run between them.
"""

import math
import queue
import threading
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

LOOK_S = 0.001  # how late a thread may see what it waits for
OVERTAKEN = 0.1  # so often another thread is first where one takes a lock
HOST_S = 60.0  # for the machine to switch threads


class Ended(BaseException):
    """The world of a thread has ended."""


class Threads:
    """All threads of a world.

    Args:
        clock, rng: the world's.

    Attributes:
        running: the thread that runs; None: an event of the clock does.
        held: locks that are held. Whoever holds one waits for nobody, so nobody waits for a lock.
        over: whether the world has ended.
        back: released when the thread that runs waits, or ends.
    """

    def __init__(self, clock, rng):
        self.running = None
        self.held = 0
        self.over = False
        self._clock = clock
        self._rng = rng
        self._begun = []
        self.back = _taken()
        self.time = SimpleNamespace(monotonic=lambda: clock.now, sleep=self.sleep)
        self.queue = SimpleNamespace(SimpleQueue=partial(_Queue, self), Empty=queue.Empty)
        self.threading = SimpleNamespace(
            Thread=partial(_Thread, self),
            RLock=partial(_Lock, self),
            Condition=lambda lock: lock,
            current_thread=lambda: self.running,
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
        )

    @contextmanager
    def used_by(self, *modules):
        with ExitStack() as stack:
            for module in modules:
                for name in {"threading", "time", "queue"}.intersection(vars(module)):
                    stack.enter_context(patch.object(module, name, getattr(self, name)))
            try:
                yield
            finally:
                self._end()

    def sleep(self, seconds):
        self.wait(lambda: False, seconds)

    def wait(self, done, timeout=None):
        """Let others run until something is so; false: it is not, after so many seconds."""
        if self.over:
            raise Ended
        thread, until = self.running, self._clock.now + (math.inf if timeout is None else timeout)
        assert thread is not None, "an event waits"
        assert not self.held, "whoever holds a lock waits"

        def look():
            if done() or self._clock.now >= until:
                self._go_on(thread)
            else:
                self._clock.after(LOOK_S * self._rng.random(), look)

        self._clock.after(LOOK_S * self._rng.random(), look)
        self.back.release()
        thread.turn.acquire()
        if self.over:
            raise Ended
        return done()

    def overtaken(self):
        """Let others be first, perhaps."""
        free = self.running is not None and not self.held and not self.over
        if free and self._rng.random() < OVERTAKEN:
            self.wait(lambda: True)

    def begin(self, thread):
        self._begun.append(thread)
        self._clock.after(0.0, lambda: self._go_on(thread))

    def _go_on(self, thread):
        self.running = thread
        thread.turn.release()
        assert self.back.acquire(timeout=HOST_S), "a thread waits for what is not in this world"
        self.running = None

    def _end(self):
        self.over, self.held = True, 0
        for thread in self._begun:
            if not thread.ended:
                self._go_on(thread)
            threading.Thread.join(thread)


class _Thread(threading.Thread):
    def __init__(self, threads, **arguments):
        super().__init__(**arguments)
        self.turn = _taken()
        self.ended = False
        self._threads = threads

    def start(self):
        super().start()
        self._threads.begin(self)

    def run(self):
        self.turn.acquire()
        try:
            with suppress(Ended):
                if not self._threads.over:
                    super().run()
        finally:
            self.ended = True
            self._threads.back.release()

    def join(self, timeout=None):
        self._threads.wait(lambda: self.ended, timeout)


class _Lock:
    """A lock, and the condition that is made of it: whoever waits looks often enough."""

    def __init__(self, threads):
        self._threads = threads

    def __enter__(self):
        self._threads.overtaken()
        self._threads.held += 1

    def __exit__(self, *exc_info):
        self._threads.held -= 1

    def notify_all(self):
        pass

    def wait_for(self, done, timeout=None):
        held, self._threads.held = self._threads.held, 0
        try:
            return self._threads.wait(done, timeout)
        finally:
            self._threads.held = held


class _Queue:
    def __init__(self, threads):
        self._threads = threads
        self._items = []

    def put(self, item):
        self._items.append(item)

    def get(self, timeout=None):
        if not self._threads.wait(lambda: bool(self._items), timeout):
            raise queue.Empty
        return self._items.pop(0)


def _taken():
    lock = threading.Lock()
    lock.acquire()
    return lock
