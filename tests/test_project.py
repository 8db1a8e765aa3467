"""Files about the project: its metadata, how to cite it, and what people are asked for."""

import importlib.util
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

import reducer

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
VERSIONS = runpy.run_path(str(ROOT / "docker" / "write_version.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = PYPROJECT["project"]
MINORS = [int(minor) for minor in re.findall(r":: 3\.(\d+)$", "\n".join(OURS["classifiers"]), re.M)]


def read(path):
    return yaml.safe_load(path.read_text())


def test_the_version_is_typed_in_one_place():
    assert "version" in OURS["dynamic"]
    source = {"version": {"attr": "reducer.__version__"}}
    assert PYPROJECT["tool"]["setuptools"]["dynamic"] == source
    found = VERSIONS["rewritten"](reducer.__version__).items()
    stale = [str(path.relative_to(ROOT)) for path, text in found if path.read_text() != text]
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
    least = re.fullmatch(r">=3\.(\d+)", OURS["requires-python"])
    assert list(range(int(least[1]), MINORS[-1] + 1)) == MINORS
    assert "Typing :: Typed" in OURS["classifiers"]
    assert all((ROOT / package / "py.typed").is_file() for package in ("reducer", "worker_client"))


@pytest.mark.parametrize(
    ("lock", "among"),
    [
        ("build.lock", {"cython", "setuptools"}),
        ("release.lock", {"build"}),
        ("runtime.lock", {re.match(r"[\w-]+", name)[0] for name in OURS["dependencies"]}),
    ],
)
def test_what_is_pinned_by_hash_is_what_tests_have(lock, among):
    """Of what both pin: only a release needs auditwheel."""
    pins = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)
    pinned, tested = (
        dict(pins.findall((ROOT / name).read_text().lower().replace("_", "-")))
        for name in (lock, "constraints.txt")
    )
    both = pinned.keys() & tested.keys()
    assert among <= both
    assert lock != "runtime.lock" or both == pinned.keys()
    assert [name for name in both if pinned[name] != tested[name]] == []


def test_alerts_fire_when_the_page_says():
    page_says = (ROOT / "docs/observing.md").read_text()
    groups = read(ROOT / "docker/prometheus/reducers.rules.yaml")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
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
    assert made == {"build-tools", "lint", "test", "docs", "wheels", "sbom"}
    built = [f"3.{minor}" for minor in MINORS]
    assert jobs["test"]["strategy"]["matrix"]["python"] == built
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}


def test_tests_run_as_root_and_as_a_user_who_is_not():
    """Root is who runs in a container, or by sudo; the runner's own user is not."""
    test, nightly = WORKFLOWS["ci"]["jobs"]["test"], WORKFLOWS["nightly"]
    assert "container" not in test
    assert test["steps"][-1] == {"run": "make test"}
    assert nightly[True]["schedule"]  # YAML 1.1 reads `on` so
    assert nightly["jobs"]["full"]["container"]["options"] == "--privileged"
    assert nightly["jobs"]["full"]["steps"][-1] == {"run": ".ci/run --full"}
    assert {"test-versions", "audit"} <= set(re.findall(r"make (\S+)", runs(nightly["jobs"])))
