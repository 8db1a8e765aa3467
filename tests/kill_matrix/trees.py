"""Copies of the tree that mutants are put into, and what their tests say."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.kill_matrix.mutants import changed
from tests.kill_matrix.plugin import NOTES, PLANT

TREES = Path("build/kill-matrix")
SOUND = TREES / "sound"
APART = (".git", ".venv*", "build", "*.egg-info", ".*_cache", ".hypothesis", "results")
# Quick to compile, and without mutants that only a compiler's warning keeps from running.
FLAGS = '"-O0", "-Werror=incompatible-pointer-types", "-Werror=int-conversion"'
TEST_S = 120
HUNG_S = TEST_S + 30  # without a note: in C, where pytest cannot end it

# What needs no socket, and is asked first, by room; then everything else that may notice.
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
LONG = ("test_simulator.py",)


class Run(NamedTuple):
    """What came of some tests: what failed, whether any began, whether pytest ended itself."""

    failed: list[str]
    began: bool
    whole: bool


def tests_of(mutant):
    """Return the files of tests that are asked first, and those that are asked then."""
    folders = [*FIRST[mutant.room], *(name for name in THEN if name not in FIRST[mutant.room])]
    tests = SOUND / "tests"
    files = [path for name in folders for path in sorted((tests / name).glob("test_*.py"))]
    files.sort(key=lambda path: path.name in LONG)
    module = Path(mutant.file).with_suffix("")
    parts = set(module.name.split("_")) - {"", "test", "plain", "loop", "runtime"}
    package = ".".join(module.parent.parts)
    imports = re.compile(
        rf"^from {package}(\.{module.name}\b| import .*\b{module.name}\b)", re.MULTILINE
    )

    def is_about_it(path):
        return parts & set(path.stem.split("_")) or imports.search(path.read_text())

    first = [path for path in files if path.parent.name in FIRST[mutant.room]]
    own = "worker_client" if module.parts[0] == "worker_client" else "transport"
    about = [path for path in files if path in first or path.parent.name == own]
    about = [path for path in about if is_about_it(path)]
    first = about + [path for path in first if path not in about]
    then = [path for path in files if path not in first]
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
        switches = {"REDUCTION_BUILD_REQUIRED": "1"}
        done = subprocess.run(
            command, cwd=self.path, env=os.environ | switches, capture_output=True, check=False
        )
        return done.returncode == 0

    def restore(self):
        """Take the change out again, and what was compiled of it."""
        for folder in ("reducer", "worker_client", "build"):
            for sound in (SOUND / folder).rglob("*.*"):
                mine = self.path / sound.relative_to(SOUND)
                if sound.suffix != ".pyc" and sound.is_file():
                    same = mine.exists() and mine.stat().st_mtime_ns == sound.stat().st_mtime_ns
                    if not same:
                        shutil.copy2(sound, mine)

    def noticed_by(self, tests, *, whole):
        """Return the tests that fail because of the mutant; None if none of them can begin.

        Args:
            tests: files.
            whole: all of them; otherwise the first.
        """
        noticed, left_out = [], []
        while True:
            run = self._run(tests, left_out, whole=whole)
            if not run.began and not left_out:
                if not self._run(tests[:1], (), whole=True, sound=True).began:
                    raise RuntimeError(f"{tests[0]} does not begin without a mutant either")
                return None
            noticed += self._confirmed(run.failed)
            left_out += run.failed
            if not run.failed or (noticed and not whole) or (whole and run.whole):
                return noticed

    def _confirmed(self, failed):
        """Return those of the tests that fail again, and do not where there is no mutant.

        A test may fail because a machine is busy, or because the checkout is broken.
        """
        if unknown := [test for test in failed if test not in self._passes]:
            sound = self._run(unknown, (), whole=True, sound=True).failed
            self._passes |= {test: test not in sound for test in unknown}
        passing = [test for test in failed if self._passes[test]]
        again = self._run(passing, (), whole=True).failed if passing else ()
        return [test for test in passing if test in again]

    def _run(self, tests, left_out, *, whole, sound=False):
        tree, notes = SOUND if sound else self.path, self.path / "build/notes"
        notes.parent.mkdir(exist_ok=True)
        notes.write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        command += ["-p", "tests.kill_matrix.plugin", "-m", "not extended"]
        command += ["-o", f"timeout={TEST_S}", *(() if whole else ("-x",))]
        command += [f"--deselect={test}" for test in left_out]
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
                _kill(process.pid)
        return _read(notes.read_text())


def _read(notes):
    lines = [line.partition(" ")[::2] for line in notes.splitlines()]
    said = {word: [test for what, test in lines if what == word] for word in ("began", "ended")}
    hung = [test for test in said["began"] if test not in said["ended"]]
    failed = [test for word, test in lines if word == "failed"]
    return Run(list(dict.fromkeys(failed + hung)), bool(said["began"]), not hung)


def _kill(group):
    """Kill what is left of a session of pytest: a rank, or a reducer that does not end."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
