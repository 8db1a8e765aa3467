"""Bugs that were planted by hand, for the fuzzers and the simulators: mutants like the others."""

from pathlib import Path

from fuzz.mutations import MUTATIONS as FUZZED
from tests.kill_matrix.mutants import Mutant
from tests.memberships.mutations import MUTATIONS as MEMBERSHIPS
from tests.quorum.mutations import MUTATIONS as QUORUM
from tests.sim import mutations as sim

PLANTED = {
    "sim": sim.MUTATIONS,
    "quorum": QUORUM,
    "memberships": MEMBERSHIPS,
}


def planted():
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
