"""Pages that lead from one machine to a pool with keys on two hosts, by their commands alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab import Lab
from tests.pages import FINGERPRINT, ROOT, blocks, finish, shell

pytest.importorskip("torch", reason="needs torch")

pytestmark = pytest.mark.extended(
    "tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]"
)


# Hosts of a lab share their files, so each has a home of its own, which these two reach. Like the
# real one, ssh reads the commands that are pasted after it, unless it has -n.
SSH = """#!/bin/sh
if test "$1" = -n; then shift; else cat >/dev/null; fi
cd "{homes}/$1" && shift && exec "$@"
"""
SCP = """#!/bin/sh
test "$1" = -r && exec cp -r "$2" "{homes}/${{3%%:*}}/${{3#*:}}"
"""
END_S = 200.0


def start(host, homes, *steps):
    """Paste commands into a shell of a host, in the checkout and with a home of its own."""
    home = homes / host.name
    home.mkdir(exist_ok=True)
    pasted = home / "pasted"
    pasted.write_text("".join(steps))
    path = os.pathsep.join([str(homes), str(Path(sys.executable).parent), os.environ["PATH"]])
    with pasted.open() as stdin:
        return host.start(
            ["bash", "-euo", "pipefail"],
            env={"HOME": str(home), "PATH": path},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )


def said_by(shell):
    said, _ = shell.communicate(timeout=END_S)
    assert shell.returncode == 0, said
    return said


@pytest.mark.timeout(600)
def test_a_pool_with_keys_on_two_machines(namespaces, tmp_path, monkeypatch):
    steps = blocks("docs/tutorial.md", "sh")
    alone, (names, copy, both, first, second, end) = steps[:5], steps[5:]
    for command, script in (("ssh", SSH), ("scp", SCP)):
        (tmp_path / command).write_text(script.format(homes=tmp_path))
        (tmp_path / command).chmod(0o755)
    for name in [name for name in os.environ if name.startswith("REDUCTION_")]:
        monkeypatch.delenv(name)
    with Lab(hosts=2, mbit=1000) as lab:
        alpha, beta = lab.hosts
        (tmp_path / beta.name).mkdir()  # where keys are copied to
        names = names.replace("alpha", alpha.name).replace("beta", beta.name)
        found = FINGERPRINT.findall(said_by(start(alpha, tmp_path, *alone, names, copy)))
        assert sorted(reducers for *_, reducers in found) == ["1", "1", "2", "2", "2", "2"]
        assert (tmp_path / beta.name / "keys" / "jobs" / "vision" / "job.secret").exists()
        shells = [start(alpha, tmp_path, names, both, first, end)]
        shells.append(start(beta, tmp_path, names, both, second, end))
        said = [said_by(shell) for shell in shells]
    ends = [FINGERPRINT.findall(one) for one in said]
    assert [[(rank, reducers) for rank, _, _, reducers in one] for one in ends] == [
        *([("0", "2")], [("1", "2")])
    ]
    assert {weights for one in ends for _, _, weights, _ in one} == {found[0][2]}
    for one in said:
        assert "job 'vision/" in one
        assert "stopped" in one


@pytest.mark.timeout(900)
def test_a_gpt_on_two_hosts(namespaces, tmp_path):
    activate, *steps = blocks("docs/gpt.md", "sh")
    assert activate in blocks("docs/index.md", "sh")[0]
    said = []
    for step in steps:
        with shell(step, HOME=str(tmp_path)) as running:
            said.append(finish(running))
    ends = [sorted(FINGERPRINT.findall(one)) for one in said]
    assert [[rank for rank, *_ in one] for one in ends] == [["0", "1"]] * len(steps)
    assert all(len({end[1:] for end in one}) == 1 for one in ends), ends
    losses, weights, reduced = zip(*(one[0][1:] for one in ends), strict=True)
    alone, embedded, stock, pool, in_8_bits = weights
    assert alone == embedded == stock == pool != in_8_bits
    assert [number == "0" for number in reduced] == [False, False, True, False, False]
    assert float(losses[-1]) == pytest.approx(float(losses[0]), rel=0.01)
    assert "job 'gpt/" in said[3]
