"""The targets by name, and the inputs in the tree."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS = Path(__file__).parent / "corpus"


class Target(NamedTuple):
    """What is fuzzed.

    Attributes:
        module: in this package; its `run` takes an input and raises if a promise is broken.
        longest: bytes of an input; more only take longer.
    """

    module: str
    longest: int

    def load(self) -> Callable[[bytes], None]:
        """Import the module, and with it what it tests."""
        run: Callable[[bytes], None] = import_module(f"fuzz.{self.module}").run
        return run


# Imported when they are needed: what comes in earlier would not be watched for coverage.
TARGETS = {
    "header": Target("headers", 128),
    "body": Target("bodies", 256),
    "handshake": Target("handshakes", 256),
    "engine": Target("engines", 600),
    "session": Target("sessions", 600),
    "zmtp": Target("connections", 200),
}


def corpus(name: str) -> list[Path]:
    """Return the files of a target's corpus, in a fixed order."""
    return sorted((CORPUS / name).iterdir())
