"""What makes up inputs and feeds them to a target: with an eye on coverage, or blindly.

The guided driver is atheris, libFuzzer for Python. It sees which lines of the protocol's modules an
input reaches, and goes on from those that reach new ones. It cannot be loaded beside the sanitizers
of a debug build; there the blind driver serves, which changes inputs of the corpus at random.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import time
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fuzz.targets import CORPUS, TARGETS, corpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FINDINGS = Path("build/fuzz")  # inputs that break a promise, and those that reach something new
SLOWEST_S = 30  # for one input, the guided driver's, or a batch of the blind one's
GROWTH = 64 << 20  # bytes that a process may grow by after its first inputs, beyond its corpus
_BATCH = 50
_PAGE = 4096


class GrowthError(AssertionError):
    """The process needs more and more memory."""


class Progress:
    """Counts inputs, knows when it is enough, and watches how much memory the process takes.

    A limit of 0 runs, or 0 seconds, is none. What is made once exists after `settle` inputs.
    """

    def __init__(self, name: str, runs: int, seconds: int, settle: int) -> None:
        self.inputs = 0
        self._name = name
        self._runs = runs
        self._seconds = seconds
        self._settle = settle
        self._begun = time.monotonic()
        self._at_first = 0

    @property
    def enough(self) -> bool:
        """Whether a limit was reached."""
        lasted = time.monotonic() - self._begun
        return 0 < self._runs <= self.inputs or 0 < self._seconds <= lasted

    def count(self) -> None:
        """Count an input."""
        self.inputs += 1
        if self.inputs == self._settle:
            self._at_first = resident_bytes()

    def report(self) -> None:
        """Print what was done.

        Raises:
            GrowthError: memory has grown beyond what the inputs that were kept explain.
        """
        now = resident_bytes()
        grown = now - self._at_first if self._at_first else 0
        print(
            f"{self._name}: {self.inputs} inputs in {time.monotonic() - self._begun:.0f} s, "
            f"resident {now >> 20} MiB, {grown / (1 << 20):+.1f} MiB since input {self._settle}",
            flush=True,
        )
        if grown > GROWTH:
            raise GrowthError(f"{self._name} has grown by {grown >> 20} MiB")


def resident_bytes() -> int:
    """Return how much memory this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def guided(name: str, runs: int, seconds: int, seed: int) -> NoReturn:
    """Fuzz a target with atheris, which ends the process: with 0, or 77 and a traceback."""
    import atheris  # noqa: PLC0415 (the extra `fuzz`; the tests go without)

    logging.disable()
    with atheris.instrument_imports(include=["reducer", "worker_client", "fuzz"]):
        run = TARGETS[name].load()
    kept = FINDINGS / name
    kept.mkdir(parents=True, exist_ok=True)
    progress = Progress(name, runs, seconds, settle=10_000)

    def one(data: bytes) -> None:
        run(data)
        progress.count()
        if progress.enough:
            progress.report()
            os._exit(0)  # libFuzzer would end the process without a word to Python

    options = [
        "-verbosity=0",
        "-len_control=0",  # a story needs many steps before anything can go wrong
        f"-max_len={TARGETS[name].longest}",
        f"-seed={seed}",
        f"-timeout={SLOWEST_S}",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={FINDINGS}/{name}-",
        str(kept),
        str(CORPUS / name),
    ]
    atheris.Setup(["fuzz", *options], one)
    atheris.Fuzz()
    raise SystemExit(0)


def blind(name: str, runs: int, seconds: int, seed: int, *, trace: bool = False) -> int:
    """Fuzz a target with inputs of the corpus, changed at random; return their number.

    With `trace`, print the number of each input and leave it in `FINDINGS` before it is tried, for
    crashes that end the process. An input that breaks a promise is left there, and raises.
    """
    run = TARGETS[name].load()
    progress = Progress(name, runs, seconds, settle=1000)
    inputs = _changed(name, random.Random(seed))  # noqa: S311 (no secret)
    with _silence(), _hangs_shown() as begin_batch:
        while not progress.enough:
            if progress.inputs % _BATCH == 0:
                begin_batch()
            data = next(inputs)
            if trace:
                print(f"input {progress.inputs + 1}", flush=True)
                keep(f"{name}-latest", data)
            try:
                run(data)
            except BaseException:
                path = keep(f"{name}-{zlib.crc32(data):08x}", data)
                print(f"input {progress.inputs + 1} breaks a promise: it is {path}", flush=True)
                raise
            progress.count()
    progress.report()
    return progress.inputs


@contextmanager
def _silence() -> Iterator[None]:
    """Log nothing: refusals are what most inputs end with."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _hangs_shown() -> Iterator[Callable[[], None]]:
    """Yield what begins a batch, which ends the process if it takes too long, even one in C."""

    def begin() -> None:
        faulthandler.dump_traceback_later(SLOWEST_S * 10, exit=True, file=2)

    try:
        yield begin
    finally:
        faulthandler.cancel_dump_traceback_later()  # else it would end whoever goes on


def keep(name: str, data: bytes) -> Path:
    """Write down an input that breaks a promise, or may."""
    FINDINGS.mkdir(parents=True, exist_ok=True)
    path = FINDINGS / name
    path.write_bytes(data)
    return path


def _changed(name: str, chance: random.Random) -> Iterator[bytes]:
    """Make up inputs without end: random ones, and changed, cut and joined ones of the corpus."""
    seeds = [path.read_bytes() for path in corpus(name)]
    longest = TARGETS[name].longest
    while True:
        if chance.random() < 0.3:
            yield chance.randbytes(chance.randrange(1, longest))
            continue
        data = bytearray(chance.choice(seeds))
        if chance.random() < 0.5:
            data += chance.choice(seeds)[chance.randrange(longest) :]
        for _ in range(chance.randrange(1, 9)):
            at = chance.randrange(len(data) + 1)
            kind = chance.randrange(3)
            if kind == 0:
                data[at : at + 1] = chance.randbytes(1)
            elif kind == 1:
                data[at:at] = chance.randbytes(chance.randrange(1, 5))
            else:
                del data[at : at + chance.randrange(1, 9)]
        yield bytes(data[:longest])
