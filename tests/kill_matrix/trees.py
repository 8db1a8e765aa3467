"""Copies of the tree that mutants are put into, and what their tests say."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.commands import run_command
from tests.kill_matrix.mutants import changed
from tests.kill_matrix.plugin import NOTES, PLANT
from tests.kill_matrix.results import NOT_BUILT, NOTHING, noticing

TREES = Path("build/kill-matrix")
SOUND = TREES / "sound"
APART = (".git", ".venv*", "build", "*.egg-info", ".*_cache", ".hypothesis", "results")
# Quick to compile, and without mutants that only a compiler's warning keeps from running.
FLAGS = '"-O0", "-Werror=incompatible-pointer-types", "-Werror=int-conversion"'
TEST_S = 120
HUNG_S = TEST_S + 30  # without a note: in C, where pytest cannot end it

# What needs no socket, and is asked first, by room; then everything else that may notice, the
# nearest first.
FIRST = {
    "reducer/engine": ("engine", "sim", "wire", "fuzz"),
    "worker_client/protocol": ("engine", "sim", "wire", "fuzz"),
    "worker_client/communicators": ("memberships",),
    "worker_client/outer": ("quorum",),
    "worker_client/runtime": ("transport",),
    "reducer/runtime": ("transport",),
    "reducer/zmtp": ("zmtp", "fuzz"),
    "planted": ("quorum", "memberships", "sim", "engine", "wire", "zmtp", "fuzz"),
}
THEN = ("transport", "worker_client", "reducer", "security", "faults", "integration")
JOBS = ("integration", "faults", "worker_client", "security", "transport", "reducer")
THEN_OF = {"worker_client/communicators": JOBS, "worker_client/outer": JOBS[:1]}
ONLY = {"worker_client/outer": "OuterOptimizer"}  # a test that never uses it notices no mutant
CALLED = {  # what tests are about, where they call it differently
    "node": {"nodes"},
    "node_fold": {"nodes"},
    "node_group": {"nodes"},
    "elastic": {"join", "loss"},
    "newcomers": {"join", "lobby"},
    "averaging": {"quorum"},
    "fragment": {"quorum"},
}
LONG = ("test_state_machine.py", "test_simulator.py")


def tests_of(mutant):
    """Return the files of tests to run first, and those to run if none of these fails.

    Tests about the mutant's own file are in both lists, as new ones may have come in between. Each
    list begins with the tests that have noticed the most mutants of the room.
    """
    folders = dict.fromkeys((*FIRST[mutant.room], *THEN_OF.get(mutant.room, THEN)))
    tests = SOUND / "tests"
    files = [path for name in folders for path in sorted((tests / name).glob("test_*.py"))]
    files.sort(key=lambda path: path.name in LONG)
    module = Path(mutant.file).with_suffix("")
    parts = {*module.name.split("_"), module.parent.name} - {"", "test", "plain", "loop", "runtime"}
    parts |= CALLED.get(module.name, set())
    package = re.escape(".".join(module.parent.parts))
    imports = rf"(?m)^from {package}(\.{module.name}\b| import .*\b{module.name}\b)"
    own = "worker_client" if module.parts[0] == "worker_client" else "transport"

    def place(path):
        """What is about the file comes first, and then what needs no socket."""
        soon = path.parent.name in FIRST[mutant.room]
        near = soon or path.parent.name == own
        about = parts & set(path.stem.split("_")) or re.search(imports, path.read_text())
        return 0 if near and about else 1 if soon else 2 if about else 3

    noticed = noticing(module.parent)
    files.sort(key=lambda path: (-noticed[str(path.relative_to(SOUND))], place(path)))
    first = [path for path in files if place(path) <= 1]
    only = ONLY.get(mutant.room, "")
    then = [p for p in files if place(p) == 0 or (place(p) >= 2 and only in p.read_text())]
    return [[str(path.relative_to(SOUND)) for path in part] for part in (first, then)]


def copy_checkout():
    """Copy the checkout, with what is compiled, to where no change to it disturbs a run."""
    built = TREES.with_name("kill-matrix-built")  # earlier: what has not changed stays
    if (SOUND / "build").exists():
        (SOUND / "build").rename(built)
    shutil.rmtree(TREES, ignore_errors=True)
    shutil.copytree(".", SOUND, ignore=shutil.ignore_patterns(*APART), symlinks=True)
    if built.exists():
        built.rename(SOUND / "build")
    (SOUND / ".venv").symlink_to(Path(".venv").absolute())
    setup = SOUND / "setup.py"
    setup.write_text(setup.read_text().replace('"-O3"', FLAGS))
    if not Tree(SOUND).build():
        raise RuntimeError("the extensions of this checkout cannot be built")


class Tree:
    """A copy of the tree, in which one mutant is at a time."""

    def __init__(self, path):
        self.path = path
        self._plant = ""
        self._passes = {}  # by test, whether it passes without a mutant
        if not path.exists():
            shutil.copytree(SOUND, path, symlinks=True)

    def plant(self, mutant):
        """Make a mutant's change, and say whether what it is in could be built."""
        self.restore()
        self._plant = mutant.plant
        files = {edit[0] for edit in mutant.edits}
        for file in files:
            edits = [edit for edit in mutant.edits if edit[0] == file]
            path = self.path / file
            path.write_text(changed(path.read_text(), edits))
        return not mutant.is_compiled or self.build()

    def build(self):
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        return not run_command(*command, cwd=self.path).returncode

    def restore(self):
        """Take the change out again, and what was compiled of it."""
        for folder in ("reducer", "worker_client", "build"):
            for sound in (SOUND / folder).rglob("*.*"):
                mine = self.path / sound.relative_to(SOUND)
                if sound.suffix == ".pyc" or not sound.is_file():
                    continue
                if not mine.exists() or mine.stat().st_mtime_ns != sound.stat().st_mtime_ns:
                    shutil.copy2(sound, mine)

    def noticed_by(self, tests):
        """Return the first test of some files that fails because of the mutant."""
        left_out = broken = [test for test, passes in self._passes.items() if not passes]
        while True:
            began, failed = self._run(tests, left_out)
            if not began and left_out is broken:
                if not self._run(tests[:1], (), sound=True)[0]:
                    raise RuntimeError(f"{tests[0]} does not begin without a mutant either")
                return NOT_BUILT  # it cannot be imported
            if not failed:
                return NOTHING
            for test in failed:
                # A test may fail because a machine is busy, or because the checkout is broken.
                if test not in self._passes:
                    self._passes[test] = not self._run([test], (), sound=True)[1]
                if self._passes[test] and self._run([test], ())[1]:
                    return test
            left_out = left_out + failed
            tests = tests[tests.index(failed[0].partition("::")[0]) :]  # those before have passed

    def _run(self, tests, left_out, *, sound=False):
        """Run tests until one fails; return whether any began, and those that failed or hung."""
        tree, notes = SOUND if sound else self.path, self.path / "build/notes"
        notes.parent.mkdir(exist_ok=True)
        notes.write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
        command += ["-p", "tests.kill_matrix.plugin", "-m", "not extended"]
        command += ["-o", f"timeout={TEST_S}", *(f"--deselect={test}" for test in left_out)]
        environment = {
            "PYTHONPATH": str(tree.absolute()),  # before the checkout, which is installed
            "PYTHONDONTWRITEBYTECODE": "1",  # two changes in one second would look alike
            NOTES: str(notes.absolute()),
            PLANT: "" if sound else self._plant,
        }
        with subprocess.Popen(
            [*command, *tests],
            cwd=tree,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                while process.poll() is None and time.time() - notes.stat().st_mtime < HUNG_S:
                    time.sleep(0.1)
            finally:
                # What is left: a rank, or a reducer that does not end.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        lines = [line.partition(" ")[::2] for line in notes.read_text().splitlines()]
        began, ended, failed = (
            [test for what, test in lines if what == word] for word in ("began", "ended", "failed")
        )
        return bool(began), list(dict.fromkeys(failed + [one for one in began if one not in ended]))
