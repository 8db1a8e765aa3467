"""The quick start of the README and the pool of docs/frameworks.md run as they stand there."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.pages import (
    FINGERPRINT,
    answer_torchrun,
    blocks,
    finish,
    on_free_ports,
    shell,
    stand_in_for_torchrun,
)

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readme_fits_a_few_screens():
    assert len(README.splitlines()) <= 160
    assert all(len(line) <= 100 for line in README.splitlines() if not line.startswith("|"))


def test_the_quick_start_is_the_example():
    (script,) = blocks("README.md", "python", "Quick start")
    assert script == (ROOT / "examples" / "quickstart.py").read_text()


@pytest.mark.extended_cases("torchrun")
@pytest.mark.parametrize("launcher", ["forks", "torchrun"])
def test_the_quick_start_runs_as_shown(launcher, tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    (script,) = blocks("README.md", "sh", "Quick start")
    assert script.count("5555") == script.count("5556") == 2
    if launcher == "forks":
        stand_in_for_torchrun(tmp_path)
    with shell(on_free_ports(script), path=tmp_path) as running:
        if launcher == "forks":
            asked = [answer_torchrun(tmp_path) for _ in range(2)]
            assert ["REDUCTION_SERVERS" in one.settings for one in asked] == [True, False]
            for one in asked:
                assert one.arguments == ["--nproc-per-node", "3", "examples/quickstart.py"]
        said = finish(running)
    ends = FINGERPRINT.findall(said)
    assert sorted((int(reducers), int(rank)) for rank, _, _, reducers in ends) == [
        (reducers, rank) for reducers in (2, 3) for rank in (0, 1, 2)
    ]
    assert len({weights for _, _, weights, _ in ends}) == 1
    assert all(float(loss) < 1e-3 for _, loss, _, _ in ends)


def test_the_pool_for_a_notebook_runs_as_shown_and_warns_of_nothing():
    page = (ROOT / "docs" / "frameworks.md").read_text()
    found = re.search(r"^from reducer import local_pool\n.*?(?=^```$)", page, re.M | re.DOTALL)
    assert found, "docs/frameworks.md has no local_pool"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("REDUCTION_")}
    command = (sys.executable, "-c", f"import worker_client\n{found[0]}")
    ended = run_command(*command, env=environment, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "")
    begins, ends = ended.stderr.splitlines()
    assert begins.startswith("reduction: rank 0 of 1, job ")
    assert ends.startswith("reduction: rank 0 of 1, job ")


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
