"""Files about the project: its metadata, how to cite it, and what people are asked for."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import yaml

import reducer
from worker_client.config import REDUCER_SETTINGS, WorkerConfig

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
VERSIONS = runpy.run_path(str(ROOT / "docker" / "write_version.py"))
tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = PYPROJECT["project"]
MINORS = [int(minor) for minor in re.findall(r":: 3\.(\d+)$", "\n".join(OURS["classifiers"]), re.M)]


def read(path):
    return yaml.safe_load(path.read_text())


def test_the_version_is_typed_in_one_place():
    assert "version" in OURS["dynamic"]
    source = {"version": {"attr": "reducer.__version__"}}
    assert PYPROJECT["tool"]["setuptools"]["dynamic"] == source
    found = VERSIONS["rewritten"](reducer.__version__)
    stale = [
        str(path.relative_to(ROOT)) for path, text in found.items() if path.read_text() != text
    ]
    assert stale == [], "run: .venv/bin/python docker/write_version.py"
    assert read(ROOT / "CITATION.cff")["license"] == OURS["license"]


def test_a_new_version_reaches_every_file_that_names_one():
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


def test_classifiers_name_what_runs_it():
    classifiers = OURS["classifiers"]
    least = re.fullmatch(r">=3\.(\d+)", OURS["requires-python"])
    assert least
    assert list(range(int(least[1]), MINORS[-1] + 1)) == MINORS
    assert "Typing :: Typed" in classifiers
    for package in ("reducer", "worker_client"):
        assert (ROOT / package / "py.typed").is_file()


def test_what_older_pythons_need_is_asked_for_there_alone():
    (tomli,) = (text for text in OURS["dependencies"] if text.startswith("tomli"))
    assert re.fullmatch(r"""tomli>=2; python_version < ["']3\.11["']""", tomli)


def test_a_release_is_built_by_the_versions_of_constraints():
    """Of what both pin: only a release needs auditwheel."""
    built_by, installed = (
        {
            name.lower().replace("_", "-"): version
            for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", file.read_text(), re.MULTILINE)
        }
        for file in (ROOT / "release.lock", ROOT / "constraints.txt")
    )
    assert {"build", "cython"} <= built_by.keys() & installed.keys()
    assert built_by.items() - installed.items() == {
        (name, version) for name, version in built_by.items() if name not in installed
    }


def test_alerts_fire_when_the_page_says():
    page_says = (ROOT / "docs/observing.md").read_text()
    rules = [
        rule
        for group in read(ROOT / "docker/prometheus/reducers.rules.yaml")["groups"]
        for rule in group["rules"]
    ]
    rows = re.findall(r"^\| `(\w+)`( \(critical\)|) \| (.*?) \|", page_says, re.MULTILINE)
    assert [name for name, *_ in rows] == [rule["alert"] for rule in rules]
    for (_, critical, when), rule in zip(rows, rules, strict=True):
        assert bool(critical) == (rule["labels"]["severity"] == "critical")
        minutes = re.findall(r"(\d+) minute", when)
        assert minutes == re.findall(r"(\d+)m\b", rule.get("for", rule["expr"]))[:1], rule
        (limit,) = re.findall(r"> ([\d.]+)$", rule["expr"].strip()) or ["0"]
        share = f"{float(limit):.0%}" if 0 < float(limit) < 1 else limit
        assert limit == "0" or f"more than {share} " in when, rule


WORKFLOWS = {path.stem: read(path) for path in (GITHUB / "workflows").iterdir()}


def runs(jobs):
    """Return all lines of shell of a workflow's jobs, without `sudo`."""
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    return re.sub(r"sudo (env .*?(?=make ))?", "", "\n".join(lines))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_the_least_rights_and_runs_what_is_here(name):
    jobs = WORKFLOWS[name]["jobs"]
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    given = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert given == ({"publish": {"id-token": "write"}} if name == "ci" else {})
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", action)
    targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"make (\S+)", runs(jobs))) <= {*targets}
    for module in re.findall(r"python -m (\S+)", runs(jobs)):
        assert importlib.util.find_spec(module), module


def test_every_change_runs_every_python_and_a_tag_what_all_have_passed():
    jobs = WORKFLOWS["ci"]["jobs"]
    made = set(re.findall(r"make (\S+)", runs(jobs)))
    assert made == {"lint", "test", "docs", "wheels", "sbom"}
    assert jobs["test"]["strategy"]["matrix"]["python"] == [
        f"3.{minor}"
        for minor in MINORS
        if minor >= 11  # older ones have no wheel
    ]
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}


def test_tests_run_as_root_and_as_a_user_who_is_not():
    """Root is who runs in a container, or by sudo; the runner's own user is not."""
    *_, test = WORKFLOWS["ci"]["jobs"]["test"]["steps"]
    assert "container" not in WORKFLOWS["ci"]["jobs"]["test"]
    assert test == {"run": "make test"}
    nightly = WORKFLOWS["nightly"]
    assert nightly[True]["schedule"]  # YAML 1.1 reads `on` so
    assert nightly["jobs"]["full"]["container"]["options"] == "--privileged"
    assert nightly["jobs"]["full"]["steps"][-1] == {"run": ".ci/run --full"}
    assert nightly["jobs"]["lab"]["steps"][-1]["run"].startswith("sudo ")
    assert nightly["jobs"]["arm"]["runs-on"].endswith("-arm")
    assert {"test-versions", "audit"} <= set(re.findall(r"make (\S+)", runs(nightly["jobs"])))


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_what_an_issue_asks_for(name):
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


def test_every_setting_and_page_that_these_files_name_exists():
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
