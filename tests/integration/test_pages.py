"""The commands of the site's first pages run as they stand there: first page, tutorial, newcomers.

The part of the tutorial that takes two machines is in tests/lab/test_tutorial.py.
"""

import json
import re

import pytest

from tests.commands import run_command
from tests.pages import (
    FINGERPRINT,
    ROOT,
    answer_torchrun,
    blocks,
    finish,
    on_free_ports,
    shell,
    stand_in_for_torchrun,
)

QUICKSTART = ["--nproc-per-node", "2", "examples/quickstart.py"]


@pytest.fixture
def torchrun(tmp_path):
    """A folder with a stand-in for torchrun."""
    pytest.importorskip("torch", reason="needs torch")
    stand_in_for_torchrun(tmp_path)
    return tmp_path


@pytest.mark.extended("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]")
def test_the_three_commands_of_the_first_page_run_as_shown():
    if run_command("make", "--question", ".venv/demo-ready", cwd=ROOT).returncode:
        pytest.skip("would install packages: run make demo")
    (commands,) = blocks("docs/index.md", "sh")
    with shell(commands) as running:
        said = finish(running)
    assert "largest weight difference to Gloo" in said
    assert len({weights for _, _, weights, _ in FINGERPRINT.findall(said)}) == 1


def test_the_tutorial_goes_on_from_the_first_page():
    (commands,) = blocks("docs/index.md", "sh")
    assert commands.splitlines()[-1] in blocks("docs/tutorial.md", "sh")[0]


@pytest.mark.extended("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]")
def test_the_tutorial_runs_as_shown_on_one_machine(torchrun):
    steps = on_free_ports("".join(blocks("docs/tutorial.md", "sh")[:5]))
    with shell(steps, path=torchrun, HOME=str(torchrun)) as running:
        asked = [answer_torchrun(torchrun) for _ in range(3)]
        said = finish(running)
    assert [one.arguments for one in asked] == [QUICKSTART] * 3
    assert [len(one.settings.get("REDUCTION_SERVERS", "").split(":")) - 1 for one in asked] == [
        *(0, 2, 1)
    ]
    assert asked[2].settings["REDUCTION_KEYS"] == str(torchrun / "keys" / "jobs" / "vision")
    ends = FINGERPRINT.findall(said)
    assert sorted(reducers for *_, reducers in ends) == ["1", "1", "2", "2", "2", "2"]
    assert len({weights for _, _, weights, _ in ends}) == 1
    assert "2 of 2 reducers are well" in said
    assert said.count(" serving ") == 2
    assert "demands a key, and this worker has none" in said
    assert "as it should be" in said


@pytest.mark.extended("tests/integration/test_horovod.py")
def test_a_script_for_horovod_runs_as_shown(torchrun):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    (train,) = blocks("docs/from-horovod.md", "sh")
    (line,) = blocks("docs/from-horovod.md", "python")
    assert line in (ROOT / "examples" / "horovod_digits.py").read_text()
    with shell(train, path=torchrun) as running:
        answer_torchrun(torchrun)
        first, second = FINGERPRINT.findall(finish(running))
    assert first[2] == second[2]
    assert int(first[3]) > 0


@pytest.mark.extended("tests/integration/test_torch_backend.py")
def test_the_backend_trains_as_gloo_does(torchrun):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    (train,) = blocks("docs/from-gloo.md", "sh")
    with shell(train, path=torchrun) as running:
        for _ in range(2):
            answer_torchrun(torchrun)
        ends = FINGERPRINT.findall(finish(running))
    ours, stock = ([end for end in ends if (end[3] != "0") == kind] for kind in (True, False))
    assert len(ours) == len(stock) == 2
    assert len({weights for _, _, weights, _ in ours}) == 1
    assert float(ours[0][1]) == pytest.approx(float(stock[0][1]), abs=1e-5)


def test_a_job_for_vertex_is_planned_and_rehearsed_as_shown():
    plan, rehearse = blocks("docs/from-vertex.md", "sh")
    with shell(plan) as running:
        printed = json.loads(finish(running))
    assert [pool["replicaCount"] for pool in printed["workerPoolSpecs"]] == [1, 7, 8]
    with shell(rehearse) as running:
        said = finish(running)
    page = (ROOT / "docs" / "from-vertex.md").read_text()
    shown = re.findall(r"^    (\w+ .*\(.*\))$", page, re.MULTILINE)
    assert len(shown) == 3
    rows = {tuple(row.split()) for row in said.splitlines()}
    assert {tuple(row.split()) for row in shown} <= rows
    assert re.search(r"^runs +\S+python\S* -m reducer serve ", said, re.MULTILINE)
