"""Files about the project: its metadata, how to cite it, and what people are asked for."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

import reducer
from reducer.wire.constants import PORT
from worker_client.config import REDUCER_SETTINGS, WorkerConfig

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
VERSIONS = runpy.run_path(str(ROOT / "docker" / "write_version.py"))
tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = PYPROJECT["project"]
MINORS = [int(minor) for minor in re.findall(r":: 3\.(\d+)$", "\n".join(OURS["classifiers"]), re.M)]


def stated(file: str, words: str) -> str:
    """Return the only thing that a file says in these words."""
    (found,) = re.findall(words, (ROOT / file).read_text(), re.MULTILINE)
    return found


STABLE = stated("setup.py", r'"cp3(\d+)"')  # from this Python on there is one wheel, and `make`
LEAST_TORCH = OURS["optional-dependencies"]["torch"][0].removeprefix("torch>=")
HTTP = stated("docker/reducer.Dockerfile", r"REDUCTION_HTTP=.*:(\d+)")
BUCKET_MB = stated("worker_client/ddp.py", r"^DEFAULT_BUCKET_CAP_MB = (\d+)")


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
    assert list(range(int(least[1]), MINORS[-1] + 1)) == MINORS
    assert "Typing :: Typed" in classifiers
    for package in ("reducer", "worker_client"):
        assert (ROOT / package / "py.typed").is_file()


def test_what_older_pythons_need_is_asked_for_there_alone() -> None:
    (tomli,) = (text for text in OURS["dependencies"] if text.startswith("tomli"))
    assert re.fullmatch(r"""tomli>=2; python_version < ["']3\.11["']""", tomli)


def test_it_is_cited_by_version_and_license() -> None:
    found = read(ROOT / "CITATION.cff")
    assert (found["version"], found["license"]) == (reducer.__version__, OURS["license"])


# Files, what they repeat there, and what it must be.
REPEATED = (
    ("CHANGELOG.md", r"\A(?:.*\n)*?## \[(.*)\]", reducer.__version__),
    ("Makefile", r"^PACKAGE := (.*)|freeze --exclude (\S+)", OURS["name"]),
    (
        "Makefile *.md docs/*.md",
        r"Pythons? from 3\.(\d+)|Python 3\.(\d+) or later \(with|python3 >= 3\.(\d+)",
        STABLE,
    ),
    ("setup.py", r"Py_LIMITED_API=0x03(..)0000", f"{int(STABLE):02x}"),
    ("docs/compatibility.md", r"asks for Python 3\.(\d+)", str(MINORS[0])),
    ("docs/compatibility.md", r"for torch (\d+\.\d+) or later", LEAST_TORCH),
    ("pyproject.toml", r'"torch>=(.*?)"', LEAST_TORCH),
    ("*.md docs/*.md docker/**/*.*", r"tcp://0\.0\.0\.0:(\d+)", str(PORT)),
    ("docker/**/*.yaml", r"name: data, (?:containerP|p)ort: (\d+)", str(PORT)),
    ("docker/**/*.yaml", r"name: http, (?:containerP|p)ort: (\d+)|--http=\S*:(\d+)", HTTP),
    ("docker/reducer.Dockerfile", r"^EXPOSE (.*)", f"{PORT} {HTTP}"),
    ("README.md docs/*.md examples/*.py", r"\bDistributedDataParallel\(.*cap_mb=(\d+)", BUCKET_MB),
    ("worker_client/lightning.py", r"DDP's, (\d+) by default", BUCKET_MB),
    ("docs/frameworks.md", r"Buckets are (\d+) MB unless", BUCKET_MB),
)


@pytest.mark.parametrize(("files", "words", "said"), REPEATED)
def test_what_files_repeat_is_so(files: str, words: str, said: str) -> None:
    found = [
        (str(path.relative_to(ROOT)), match[match.lastindex])
        for pattern in files.split()
        for path in sorted(ROOT.glob(pattern))
        for match in re.finditer(words, path.read_text(), re.MULTILINE)
    ]
    assert found
    assert [one for one in found if one[1] != said] == []


def test_the_workflow_runs_what_is_here() -> None:
    """On every Python that `make` takes, with the least rights, by actions of a major version."""
    (path,) = (GITHUB / "workflows").iterdir()
    workflow = read(path)
    jobs = workflow["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    made = {step["run"].removeprefix("make ") for step in steps if "make" in step.get("run", "")}
    assert made == {"lint", "test", "docs", "wheels"}
    assert jobs["test"]["strategy"]["matrix"]["python"] == [
        f"3.{minor}" for minor in MINORS if minor >= int(STABLE)
    ]
    for step in steps:
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1"))
    assert workflow["permissions"] == {"contents": "read"}
    given = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert given == {"publish": {"id-token": "write"}}
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_what_an_issue_asks_for(name: str) -> None:
    form = read(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
    questions = [part for part in form["body"] if part["type"] != "markdown"]
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
    files = [
        *GITHUB.glob("*.md"),
        *GITHUB.glob("ISSUE_TEMPLATE/*"),
        ROOT / "CODE_OF_CONDUCT.md",
        ROOT / "SECURITY.md",
    ]
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
