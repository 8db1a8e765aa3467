"""Files about the project: its metadata, how to cite it, and what people are asked for."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

import reducer
from worker_client.config import REDUCER_SETTINGS, WorkerConfig

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}  # of GitHub's forms
VERSIONS = runpy.run_path(str(ROOT / "docker" / "write_version.py"))
tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = PYPROJECT["project"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_version_is_typed_in_one_place() -> None:
    assert "version" in OURS["dynamic"]
    source = {"version": {"attr": "reducer.__version__"}}
    assert PYPROJECT["tool"]["setuptools"]["dynamic"] == source
    found = VERSIONS["rewritten"](reducer.__version__)
    stale = [
        str(path.relative_to(ROOT)) for path, text in found.items() if path.read_text() != text
    ]
    assert stale == [], "run: .venv/bin/python docker/write_version.py"


def test_a_new_version_reaches_every_file_that_names_one() -> None:
    found = VERSIONS["rewritten"]("9.8.7rc1")
    named = {str(path.relative_to(ROOT)) for path in found}
    assert {"CITATION.cff", "docs/deployment.md", "docker/worker.Dockerfile"} <= named
    for folder in ("docker", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".md", ".yml", ".yaml", ".Dockerfile"}:
                left = found.get(path, path.read_text())
                images = re.findall(r"REGISTRY/\w+:(\S+)|VERSION=(\S+)|newTag: (\S+)", left)
                assert {"".join(image) for image in images} <= {"9.8.7rc1"}, path
    chart = yaml.safe_load(found[ROOT / "docker/helm/reducer/Chart.yaml"])
    assert (chart["version"], chart["appVersion"]) == ("9.8.7-rc1", "9.8.7rc1")


def test_classifiers_name_what_runs_it() -> None:
    classifiers = OURS["classifiers"]
    least = re.fullmatch(r">=3\.(\d+)", OURS["requires-python"])
    assert least
    named = re.findall(
        r"^Programming Language :: Python :: 3\.(\d+)$", "\n".join(classifiers), re.M
    )
    assert [int(minor) for minor in named] == list(range(int(least[1]), int(named[-1]) + 1))
    assert "Typing :: Typed" in classifiers
    for package in ("reducer", "worker_client"):
        assert (ROOT / package / "py.typed").is_file()


def test_what_older_pythons_need_is_asked_for_there_alone() -> None:
    (tomli,) = (text for text in OURS["dependencies"] if text.startswith("tomli"))
    assert re.fullmatch(r"""tomli>=2; python_version < ["']3\.11["']""", tomli)


def test_it_can_be_cited() -> None:
    """By the required fields of the Citation File Format 1.2.0, and those that must be true."""
    found = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["cff-version"] == "1.2.0"
    assert found["type"] == "software"
    assert all(
        set(author) <= {"name", "family-names", "given-names"} for author in found["authors"]
    )
    assert (found["version"], found["license"]) == (reducer.__version__, OURS["license"])


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_what_an_issue_asks_for(name: str) -> None:
    form = read(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels"}
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in form["body"]} <= FIELDS
    names = [part["id"] for part in questions]
    assert len(set(names)) == len(names)
    labels = [part["attributes"]["label"] for part in questions]
    assert len(set(labels)) == len(labels)
    assert any(part.get("validations", {}).get("required") for part in questions)
    text = str(form["body"])
    for word in ("worker-client doctor", "ersions"):
        assert word in text
    if name == "bug_report":
        assert {"REDUCTION_TIMELINE", "REDUCTION_DUMP", "SECURITY.md"} <= set(
            re.findall(r"REDUCTION_\w+|SECURITY\.md", text)
        )


def test_every_setting_and_page_that_these_files_name_exists() -> None:

    files = [*GITHUB.rglob("*.*"), ROOT / "CODE_OF_CONDUCT.md", ROOT / "SECURITY.md"]
    settings = {
        f"REDUCTION_{name.upper()}" for name in (*WorkerConfig.model_fields, *REDUCER_SETTINGS)
    }
    for path in files:
        text = path.read_text()
        assert set(re.findall(r"REDUCTION_\w+", text)) <= settings, path
        for link, anchor in re.findall(r"\]\(([\w./]+\.md)(#[\w-]+)?\)", text):
            target = path.parent / link
            assert target.is_file(), f"{path} names {link}"
            titles = re.findall(r"^#+ (.*)", target.read_text(), re.M)
            anchors = {
                "#" + re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
            }
            assert not anchor or anchor in anchors, f"{path} names {link}{anchor}"
