"""SLURM's lists: against `scontrol`, where it is, and what is no list."""

import pytest

from reducer.errors import ConfigError
from tests.commands import run_command
from tests.launch.conftest import bare_environment
from worker_client.launch.hostlist import hosts, tasks

LISTS = {
    "a": ["a"],
    "a,b": ["a", "b"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[01-03,7]": ["n01", "n02", "n03", "n7"],
    "n[008-012]": ["n008", "n009", "n010", "n011", "n012"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[3,1,2]": ["n3", "n1", "n2"],
    "a[0-1]b[0-2]": ["a0b0", "a0b1", "a0b2", "a1b0", "a1b1", "a1b2"],
    "r[1,3]n[09-10],login": ["r1n09", "r1n10", "r3n09", "r3n10", "login"],
    "x[1-2],y[3-4],z": ["x1", "x2", "y3", "y4", "z"],
    "gpu-a[001-002]": ["gpu-a001", "gpu-a002"],
    "127.0.0.[1-2]": ["127.0.0.1", "127.0.0.2"],
}
NO_LISTS = ["", "n[1-2]m", "n[", "n]", "n[]", "n[1-]", "n[a-b]", "a,,b", "n[1-2", "n[2-1]", "a b"]
TOO_LONG = ["n[0-99999999]", "a[0-999]b[0-999]", ",".join(["n[0-40000]"] * 2)]


@pytest.mark.parametrize("text", LISTS)
def test_hosts(text):
    assert hosts("X", text) == LISTS[text]


def test_scontrol_agrees(slurm):
    for text, expected in LISTS.items():
        command = ("scontrol", "show", "hostnames", text)
        said = run_command(*command, env=bare_environment(**slurm))
        assert (said.returncode, said.stdout.split()) == (0, expected)


@pytest.mark.parametrize("text", [*NO_LISTS, *TOO_LONG])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ConfigError, match=r"^X: .* \(got "):
        hosts("X", text)


def test_tasks():
    assert tasks("X", "2(x3),1") == [2, 2, 2, 1]
    assert tasks("X", "4") == [4]
    for wrong in ("", "2(3)", "a", "2,", "1(x99999999)"):
        with pytest.raises(ConfigError, match=r"^X: "):
            tasks("X", wrong)
