"""What pytest does in a changed copy: it notes what runs and what fails, and may break a rule."""

import importlib
import os
import resource
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import Phase, settings

NOTES, PLANT = "KILL_MATRIX_NOTES", "KILL_MATRIX_PLANT"
# They plant bugs themselves, in worlds whose seeds and lines every change makes others.
LEFT_OUT = ("test_a_broken_rule_is_noticed", "test_bugs_can_be_planted")
# A mutant may ask for memory without end.
MOST_MEMORY = 16 << 30
_planted = ExitStack()


def note(word, nodeid):
    """Write at once, as the process may end in the middle of a test."""
    with Path(os.environ[NOTES]).open("a", encoding="utf-8") as notes:
        notes.write(f"{word} {nodeid}\n")


def pytest_sessionstart():
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quick = [one for one in Phase if one not in {Phase.shrink, Phase.explain}]
    settings.register_profile("first", settings.get_profile("untimed"), phases=quick)
    settings.load_profile("first")  # an example that fails is enough, whatever its size
    if os.environ.get(PLANT):
        room, name = os.environ[PLANT].split(":")
        _planted.enter_context(importlib.import_module(f"tests.{room}.mutations").broken(name))


@pytest.hookimpl(trylast=True)  # tests/conftest.py has an order of its own
def pytest_collection_modifyitems(config, items):
    def place(item):
        begins = (at for at, path in enumerate(config.args) if item.nodeid.startswith(path))
        return next(begins, len(config.args))

    asked = (one for one in items if not any(name in one.nodeid for name in LEFT_OUT))
    items[:] = sorted(asked, key=place)


def pytest_runtest_logstart(nodeid):
    note("began", nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        note("failed", report.nodeid)


def pytest_runtest_logfinish(nodeid):
    note("ended", nodeid)
