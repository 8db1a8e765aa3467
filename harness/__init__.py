"""Processes of reducers and ranks, and independent oracles: what tests and benchmarks share."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


class HarnessError(RuntimeError):
    """Processes cannot go on; the message says what they said."""
