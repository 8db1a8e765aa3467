"""Puts the mutants into copies of the tree, one by one, and notes which tests notice.

It goes on where the latest run has stopped: first all mutants meet the tests that need no socket,
and then the mutants that nothing noticed meet the other tests. A test counts when it fails twice
with the mutant and passes without it. The tree itself stays as it is; so commit a change of the
tests before its mutants are run with `--again`.
"""

import argparse
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

from fuzz.mutations import MUTATIONS as FUZZED
from tests.kill_matrix import results as kept
from tests.kill_matrix.mutants import BY_ROOM, ROOMS, Mutant, in_order
from tests.kill_matrix.results import FIRST, NOT_BUILT, UNTIL, Result
from tests.kill_matrix.trees import TREES, Tree, copy_checkout, tests_of
from tests.memberships.mutations import MUTATIONS as MEMBERSHIPS
from tests.quorum.mutations import MUTATIONS as QUORUM
from tests.sim import mutations as sim

PLANTED = {"sim": sim.MUTATIONS, "quorum": QUORUM, "memberships": MEMBERSHIPS}
MOST_CHARACTERS = 120  # of the name of a test: some have a message's bytes in theirs


def planted():
    """Return the bugs that the fuzzers and simulators plant: mutants like the others."""
    found = []
    for name, mutation in FUZZED.items():
        edits = []
        for file, sound, broken in mutation.edits:
            start = Path(file).read_text().index(sound)
            edits.append((file, start, start + len(sound), broken))
        found.append(Mutant("fuzz/mutations.py", name, "planted", mutation.what, "", tuple(edits)))
    for room, names in PLANTED.items():
        file = f"tests/{room}/mutations.py"
        found += [Mutant(file, name, "planted", "", "", (), f"{room}:{name}") for name in names]
    return found


def mutants_of(room):
    """Return all mutants of a room, or those that were planted by hand, in their order."""
    if room == "planted":
        return planted()
    files = (path for path in sorted(Path(room).iterdir()) if path.suffix in ROOMS[room])
    by_hand = (path for path in files if path.suffix != ".c" or path.stem[0] != "_")
    return in_order({str(path): path.read_text() for path in by_hand})


def chosen(by_room, results):
    """Return the first mutants of each room that can be built."""
    left_out = {one for one, result in results.items() if result.noticed == NOT_BUILT}
    found = []
    for room, mutants in by_room.items():
        built = (one for one in mutants if one.identity not in left_out)
        found += islice(built, None if room == "planted" else BY_ROOM)
    return found


def left(by_room, results):
    """Return what is not done: the new ones first, and of these what needs no compiler."""
    done = {one for one, result in results.items() if result.is_final()}
    done |= kept.equivalent().keys() & results.keys()
    mutants = [one for one in chosen(by_room, results) if one.identity not in done]
    return sorted(mutants, key=lambda one: (one.identity in results, one.is_compiled))


def run(tree, mutant, before):
    """Return the test that notices a mutant, and which tests were asked."""
    if not tree.plant(mutant):
        return NOT_BUILT, FIRST
    first, then = tests_of(mutant)
    tests, asked = (first, FIRST) if before is None else (then, UNTIL)
    return tree.noticed_by(tests)[:MOST_CHARACTERS], asked


def main():
    parser = argparse.ArgumentParser(prog="tests.kill_matrix", description=__doc__)
    rooms = (*ROOMS, "planted")
    parser.add_argument("--room", action="append", choices=rooms, help="this one's mutants alone")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no mutant later")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--table", action="store_true", help="show what is known, and run nothing")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    # The latest commit that changed the product, which mutants change.
    log = ("git", "log", "-1", "--format=%h", "--abbrev=9", "--", "reducer", "worker_client")
    commit = subprocess.check_output(log, text=True).strip()
    by_room = {room: mutants_of(room) for room in given.room or rooms}
    known = {one.identity for mutants in by_room.values() for one in mutants}
    results = {
        identity: result
        for identity, result in kept.load().items()
        if identity in known or Mutant(*identity).room not in by_room
    }
    for mutant in chosen(by_room, results) if given.again else ():
        results.pop(mutant.identity, None)
    if not given.table:
        copy_checkout()
        tree = Tree(TREES / "changed")
        while time.monotonic() < until and (mutants := left(by_room, results)):
            mutant, began = mutants[0], time.monotonic()
            noticed, asked = run(tree, mutant, results.get(mutant.identity))
            seconds = f"{time.monotonic() - began:.0f}"
            results[mutant.identity] = Result(noticed, asked, seconds, commit)
            kept.save(results)
            where = f"{mutant.file} {mutant.function}: {mutant.before} => {mutant.after}"
            print(f"{where}\n    {seconds} s: {noticed}", flush=True)
    print("\n".join(kept.table(chosen(by_room, results), results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
