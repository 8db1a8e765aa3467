"""Puts the mutants into copies of the tree, one by one, and notes which tests notice.

It goes on where the latest run has stopped: first all mutants meet the tests that need no socket,
and then the mutants that nothing noticed meet the other tests. A test counts when it fails twice
with the mutant and passes without it. The tree itself stays as it is; so commit a change of the
tests before its mutants are run with `--again`.
"""

import argparse
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from tests.kill_matrix import results as kept
from tests.kill_matrix.mutants import BY_ROOM, ROOMS, Mutant, in_order
from tests.kill_matrix.planted import planted
from tests.kill_matrix.results import ALL, FIRST, NOT_BUILT, NOTHING, UNTIL, Result
from tests.kill_matrix.trees import TREES, Tree, copy_checkout, tests_of

MOST_CHARACTERS = 120  # of the name of a test: some have a message's bytes in theirs


def mutants_of(room):
    """Return all mutants of a room, or those that were planted by hand, in their order."""
    if room == "planted":
        return planted()
    return in_order(
        {
            str(path): path.read_text()
            for path in sorted(Path(room).iterdir())
            if path.suffix in ROOMS[room] and not (path.suffix == ".c" and path.stem[0] == "_")
        }
    )


class Matrix:
    """The results, and what is left to do, for several threads."""

    def __init__(self, given):
        self._given = given
        self._until = time.monotonic() + 60 * given.minutes
        self._lock = threading.Lock()
        self._running = set()
        # The latest commit that changed the product, which mutants change.
        self._commit = subprocess.check_output(
            ["git", "log", "-1", "--format=%h", "--abbrev=9", "--", "reducer", "worker_client"],
            text=True,
        ).strip()
        self._mutants = {room: mutants_of(room) for room in given.room or (*ROOMS, "planted")}
        known = {one.identity for mutants in self._mutants.values() for one in mutants}
        self.results = {
            identity: result
            for identity, result in kept.load().items()
            if identity in known or Mutant(*identity).room not in self._mutants
        }
        if given.again:
            for mutant in self.mutants():
                self.results.pop(mutant.identity, None)

    def mutants(self):
        """Return the chosen ones: the first of each room that can be built."""
        left_out = {one for one, result in self.results.items() if result.noticed == NOT_BUILT}
        found = []
        for room, mutants in self._mutants.items():
            built = (one for one in mutants if one.identity not in left_out)
            found += islice(built, None if room == "planted" else BY_ROOM)
        return found

    def work(self, number):
        """Run mutants, each in the copy of this thread, until none is left or the time is up."""
        tree = Tree(TREES / str(number))
        while time.monotonic() < self._until and (mutant := self._next()):
            began = time.monotonic()
            before = self.results.get(mutant.identity)
            noticed, asked = self._run(tree, mutant, before)
            seconds = f"{time.monotonic() - began:.0f}"
            result = Result(
                " | ".join(test[:MOST_CHARACTERS] for test in noticed), asked, seconds, self._commit
            )
            with self._lock:
                self.results[mutant.identity] = result
                self._running.remove(mutant.identity)
                kept.save(self.results)
            where = f"{mutant.file} {mutant.function}: {mutant.before} => {mutant.after}"
            print(f"{where}\n    {seconds} s: {result.noticed}", flush=True)

    def _next(self):
        """Return one that is not done: the new ones first, and of these what needs no compiler."""
        with self._lock:
            left = [one for one in self.mutants() if not self._is_done(one.identity)]
            left.sort(key=lambda one: (one.identity in self.results, one.is_compiled))
            if left:
                self._running.add(left[0].identity)
            return left[0] if left else None

    def _is_done(self, identity):
        result = self.results.get(identity)
        done = result is not None and result.is_final(whole=self._given.whole)
        return done or identity in self._running

    def _run(self, tree, mutant, before):
        if not tree.plant(mutant):
            return [NOT_BUILT], FIRST
        first, then = tests_of(mutant)
        if self._given.whole:
            tests, asked = first + then, ALL
        elif before is None:
            tests, asked = first, FIRST
        else:
            tests, asked = then, UNTIL
        noticed = tree.noticed_by(tests, whole=self._given.whole)
        if noticed is None:  # it cannot be imported
            return [NOT_BUILT], asked
        return noticed or [NOTHING], asked


def main():
    parser = argparse.ArgumentParser(prog="tests.kill_matrix", description=__doc__)
    rooms = (*ROOMS, "planted")
    parser.add_argument("--room", action="append", choices=rooms, help="this one's mutants alone")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no mutant later")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--whole", action="store_true", help="all tests that notice, not the first")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--table", action="store_true", help="show what is known, and run nothing")
    given = parser.parse_args()
    matrix = Matrix(given)
    if not given.table:
        copy_checkout()
        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(matrix.work, range(given.jobs)))
    print("\n".join(kept.table(matrix.mutants(), matrix.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
