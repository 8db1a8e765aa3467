"""Scenarios of golden/*.txt: what is done, a line each, and after "->" what comes of it."""

import re
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
SCENARIO = re.compile(r"^(\w.*)\n((?:  .*\n)+)", re.MULTILINE)


def scenarios(name):
    """Return the scenarios of a file, by their titles."""
    return dict(SCENARIO.findall((GOLDEN / name).read_text()))


def play(script, scenario):
    """Have the script's methods do what each line says; yield the lines that came out as said."""
    for line in scenario.splitlines():
        said, _, expected = line.partition(" -> ")
        what, *words = said.split()
        found = getattr(script, what)(*words)
        assert ("" if found is None else str(found)) == expected, line
        yield line
