"""What came of each mutant, in a file that people read too, and the table of it."""

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RESULTS, EQUIVALENT = HERE / "results.tsv", HERE / "equivalent.toml"
COLUMNS = ("file", "function", "kind", "before", "after", "noticed by", "asked", "s", "commit")
NOTHING, NOT_BUILT = "nothing", "cannot be built"
# Which tests were asked: the room's own, most of which need no socket, or all others.
FIRST, UNTIL = "first", "until"


class Result(NamedTuple):
    """What came of a mutant: who noticed, which tests were asked, how long, at which commit."""

    noticed: str
    asked: str
    seconds: str
    commit: str

    def is_final(self):
        """Say whether nothing is left to ask."""
        return self.noticed != NOTHING or self.asked == UNTIL

    def is_there(self):
        """Say whether the test that noticed is still in the tree, if one did."""
        if self.noticed in {NOTHING, NOT_BUILT}:
            return True
        path, *_, test = self.noticed.split("[")[0].split("::")
        made = rf"(?m)^ *(def {test}\(|{test} = )"  # by hand, or of a transcript
        return Path(path).exists() and re.search(made, Path(path).read_text()) is not None


def load():
    """Return what is known of mutants, by their identities, but by tests that have gone."""
    rows = [line.split("\t") for line in RESULTS.read_text().splitlines()[1:]]
    found = {tuple(row[:5]): Result(*row[5:]) for row in rows}
    return {identity: result for identity, result in found.items() if result.is_there()}


def noticing(room):
    """Return how many mutants of a room each file of tests has noticed."""
    found = load().items()
    return Counter(r.noticed.partition("::")[0] for one, r in found if Path(one[0]).parent == room)


def save(results):
    rows = sorted("\t".join((*identity, *result)) for identity, result in results.items())
    RESULTS.write_text("".join(f"{row}\n" for row in ("\t".join(COLUMNS), *rows)))


def equivalent():
    """Return why some mutants change nothing that can be noticed, by their identities."""
    found = tomllib.loads(EQUIVALENT.read_text()).get("mutant", ())
    return {tuple(one[name] for name in COLUMNS[:5]): one["why"] for one in found}


def table(mutants, results):
    """Return the lines of the table: by room, what became of its mutants."""
    reasons = equivalent()
    by_room = {}
    for mutant in mutants:
        result = results.get(mutant.identity)
        if result is not None and result.noticed != NOTHING:
            became = "noticed"
        elif result is not None and mutant.identity in reasons:
            became = "equivalent"
        else:
            became = "unnoticed" if result is not None and result.is_final() else "not yet"
        by_room.setdefault(mutant.room, Counter()).update((became, "mutants"))
    words = ("mutants", "noticed", "unnoticed", "equivalent", "not yet")
    by_room["all"] = sum(by_room.values(), Counter())
    rows = [("room", *words)]
    rows += [(room, *(str(count[word]) for word in words)) for room, count in by_room.items()]
    return [f"{row[0]:30}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows]
