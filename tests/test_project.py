"""Files about the project: its metadata, how to cite it, and what people are asked for."""

import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

import reducer
from reducer.config import MOST_HTTP, ReducerConfig
from reducer.engine import engine
from reducer.monitoring import http_port, page
from reducer.runtime import guard
from reducer.timeline import MOST_BYTES as TIMELINE_BYTES
from reducer.wire import constants, layout
from reducer.wire.constants import PORT
from worker_client.config import REDUCER_SETTINGS, WorkerConfig
from worker_client.protocol import failover, flow_control, operation
from worker_client.runtime import zmtp_greeting
from worker_client.staging import split_call, wire_rule

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
VERSIONS = runpy.run_path(str(ROOT / "docker" / "write_version.py"))
tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = PYPROJECT["project"]
MINORS = [int(minor) for minor in re.findall(r":: 3\.(\d+)$", "\n".join(OURS["classifiers"]), re.M)]


def stated(file, words):
    """Return the only thing that a file says in these words."""
    (found,) = re.findall(words, (ROOT / file).read_text(), re.MULTILINE)
    return found


STABLE = stated("setup.py", r'"cp3(\d+)"')  # from this Python on there is one wheel, and `make`
LEAST_TORCH = OURS["optional-dependencies"]["torch"][0].removeprefix("torch>=")
NEWEST_TORCH = json.loads((ROOT / "docs/compatibility.json").read_text())[f"3.{STABLE} newest"][
    "torch"
]
SAFE_TORCH = stated("SECURITY.md", r"Use torch (\d+\.\d+) or later")
NAMING_TORCH = stated("docs/compatibility.md", r"From torch (\d+\.\d+) on `init")
BACKEND = "worker_client/torch_backend/__init__.py"
GLIBC = stated("README.md", r"glibc (\d\.\d+) or")
BASE = stated("docker/reducer.Dockerfile", r"^ARG BASE=(.*)")
DEFAULTS = ReducerConfig.model_fields
HTTP = stated("docker/reducer.Dockerfile", r"REDUCTION_HTTP=.*:(\d+)")
USER = stated("docker/reducer.Dockerfile", r"^USER (\d+):")
SECRET = stated("docker/helm/reducer/values.yaml", r"^keysSecret: (.*)")
CLUSTER = stated("docker/kubernetes/pool/kustomization.yaml", r"^namespace: (.*)")
BUCKET_MB = stated("worker_client/ddp.py", r"^DEFAULT_BUCKET_CAP_MB = (\d+)")


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


def test_it_is_cited_by_version_and_license():
    found = read(ROOT / "CITATION.cff")
    assert (found["version"], found["license"]) == (reducer.__version__, OURS["license"])


# Files, what they repeat there, and what it must be.
REPEATED = (
    # -- versions
    ("CHANGELOG.md", r"\A(?:.*\n)*?## \[(.*)\]", reducer.__version__),
    ("Makefile *.md docs/*.md", r"Pythons? (?:from )?3\.(\d+)(?= on\b| or later \(with)", STABLE),
    ("Makefile", r"python3 >= 3\.(\d+)", STABLE),
    ("setup.py", r"Py_LIMITED_API=0x03(..)0000", f"{int(STABLE):02x}"),
    ("pyproject.toml", r'^python_version = "3\.(\d+)"', STABLE),
    (".github/workflows/ci.yml", r'python-version: "3\.(\d+)"|python:3\.(\d+)-', STABLE),
    ("docs/compatibility.md", r"asks for Python 3\.(\d+)", MINORS[0]),
    ("pyproject.toml", r'^target-version = "py3(\d+)"', MINORS[0]),
    ("tests/wheels/test_wheels.py", r"in range\((\d+), ", MINORS[0]),
    ("tests/wheels/test_wheels.py", r"in range\(\d+, (\d+)\)", MINORS[-1] + 1),
    ("CONTRIBUTING.md", r"is installed, from 3\.(\d+) to", MINORS[0]),
    ("CONTRIBUTING.md", r"is installed, from 3\.\d+ to 3\.(\d+)", MINORS[-1]),
    ("docs/compatibility.md", r"for torch (\d+\.\d+) or later", LEAST_TORCH),
    ("docs/frameworks.md", r"It needs torch (\d+\.\d+)", LEAST_TORCH),
    ("pyproject.toml", r'"torch>=(.*?)"', LEAST_TORCH),
    (BACKEND, r'^OLDEST = "(.*)\.0\.dev0"|needs torch (\d+\.\d+)', LEAST_TORCH),
    ("docs/frameworks.md", r"for torch before (\d+\.\d+)", NAMING_TORCH),
    ("pyproject.toml", r"^# From (\d+\.\d+) on torch finds", NAMING_TORCH),
    (BACKEND, r"script changes: torch (\d+\.\d+) and", NAMING_TORCH),
    ("docs/compatibility.md", r"Releases before\s(\d+\.\d+) have a Gloo", SAFE_TORCH),
    ("docs/security.md", r"into memory from torch (\d+\.\d+) on", SAFE_TORCH),
    ("docker/worker.Dockerfile docs/deployment.md", r"torch==([\d.]+)", NEWEST_TORCH),
    ("docker/*.Dockerfile", r"^ARG BASE=(.*)", BASE),
    (
        "tests/containers/images.py docs/deployment.md .github/workflows/ci.yml",
        r'minbase(?:"?,? "?)(\w+)|-base:(\w+)|python:3\.\d+-(\w+)',
        re.findall(r"debian:(\w+)-", BASE)[0],
    ),
    (
        "reducer/wire/README.md CHANGELOG.md",
        r'protocol, version (\d\.\d)|`version` \("(.*?)"\)',
        f"{constants.VERSION_MAJOR}.{constants.VERSION_MINOR}",
    ),
    ("CONTRIBUTING.md", r"glibc (\d\.\d+)", GLIBC),
    ("CONTRIBUTING.md", r"`manylinux_(\w+)`", GLIBC.replace(".", "_")),
    # -- names
    ("Makefile", r"^PACKAGE := (.*)|freeze --exclude (\S+)", OURS["name"]),
    ("CITATION.cff docker/*.Dockerfile", r'(?:^license: |licenses=")([\w.-]+)', OURS["license"]),
    ("docker/**/*.*", r"runAs(?:User|Group): (\d+)|fsGroup: (\d+)|--[ug]id (\d+)", USER),
    ("docker/*.Dockerfile", r"^USER (\d+:\d+)", f"{USER}:{USER}"),
    ("docs/*.md", r"(?:runAsUser: |fsGroup: |chown -R |as user )(\d+)", USER),
    ("docs/*.md", r"secret generic (\S+) --from-file=keys/pool", SECRET),
    ("docker/**/*.yaml docs/security.md", r"secretName: (reducer[^,}\n]*)", SECRET),
    ("docs/*.md", r"kubectl -n (\S+)|--namespace (\S+)", CLUSTER),
    # -- ports
    ("*.md docs/*.md docker/**/*.*", r"tcp://0\.0\.0\.0:(\d+)", PORT),
    ("README.md docs/*.md docker/**/*.y*ml", r"REDUCTION_SERVERS(?:=|: )[^:\s]+:(\d+)", PORT),
    ("docs/*.md", r"[Ll]istens? at (\d+)|tcp dport (\d+)|the ports (\d+)|-p (\d+):\d+", PORT),
    ("docker/**/*.yaml", r"name: data, (?:containerP|p)ort: (\d+)", PORT),
    ("docker/**/*.yaml", r"TCP, port: (\d+), endPort|a port, from (\d+)", PORT),
    ("docker/helm/**/*.yaml", r"endPort: {{ add (\d+) ", PORT - 1),
    ("docker/helm/**/*.tpl docker/slurm/* docs/deployment.md", r"(?:ace }}|'%s):(\d+)", PORT),
    ("docker/reducer.Dockerfile", r"^EXPOSE (.*)", f"{PORT} {HTTP}"),
    ("docker/**/*.yaml", r"name: http, (?:containerP|p)ort: (\d+)|--http=\S*:(\d+)", HTTP),
    ("docker/**/*.yaml", r'prometheus.io/port"?:? "(\d+)"|TCP, port: (\d+)}', HTTP),
    ("docker/*.*", r"urlopen\('http://127\.0\.0\.1:(\d+)/", HTTP),
    ("README.md docs/observing.md", r"`reducer serve --http (\d+)`", HTTP),
    ("docs/deployment.md", r"^http = (\d+)|at (\d+); its health check", HTTP),
    # -- sizes, numbers and times
    ("CHANGELOG.md", r"a reducer \((\d+) MB", stated("docs/deployment.md", r"is (\d+) MB: Debian")),
    ("README.md docs/*.md examples/*.py", r"\bDistributedDataParallel\(.*cap_mb=(\d+)", BUCKET_MB),
    ("worker_client/lightning.py", r"DDP's, (\d+) by default", BUCKET_MB),
    ("docs/frameworks.md", r"Buckets are (\d+) MB (?:unless|by default)", BUCKET_MB),
    (
        "docs/frameworks.md worker_client/*.py",
        r"(\d+) KiB and more|smaller than (\d+) KiB",
        wire_rule.SMALLEST_BYTES >> 10,
    ),
    ("docs/frameworks.md", r"(?:at most|above) (\d+) MiB", split_call.PIECE_BYTES >> 20),
    ("docs/glossary.md worker_client/config.py", r"(\d+) KiB to \d+", layout.MIN_SHARD >> 10),
    (
        "docs/glossary.md worker_client/config.py",
        r"KiB to (\d+) KiB",
        layout.LARGEST_CHUNK >> 10,
    ),
    ("reducer/cli.py reducer/config.py", r"\b(\d+) ?KiB(?= to| \()", layout.LARGEST_CHUNK >> 10),
    ("reducer/cli.py reducer/config.py", r"\bto (\d+) ?MiB", constants.MAX_CHUNK_BYTES >> 20),
    (
        "docs/failures.md worker_client/config.py",
        r"window \((\d+) MiB|round trip, up to (\d+) MiB",
        flow_control.MOST_BYTES >> 20,
    ),
    ("docs/failures.md", r"default, up to (\d+) MiB", flow_control.MOST_FAR_BYTES >> 20),
    ("SECURITY.md", r"JSON of at most\s+(\d+) bytes", constants.MAX_BODY_BYTES),
    ("SECURITY.md", r"With (\d+)\s+open conn|/ (\d+)\)", DEFAULTS["max_connections"].default),
    ("docs/security.md", r"an eighth, and (\d+) KiB for each rank", guard.SLACK_BYTES >> 10),
    ("docs/security.md", r"twice that, and (\d+) KiB", guard.STRANGER_BYTES >> 10),
    ("reducer/runtime/loop.h", r"STRANGER_BYTES = (\d+) << 10", guard.STRANGER_BYTES >> 10),
    ("docs/security.md", r"provokes \| (\d+) in", engine.MAX_REFUSALS),
    ("docs/security.md", r"provokes \| \d+ in (\d+) s", f"{engine.REFUSALS_S:g}"),
    ("docs/security.md", r"refusals \| (\d+) in half a second", engine.MAX_LINES),
    ("docs/observing.md", r"at most ([\d,]+)\s", f"{MOST_HTTP:,}"),
    ("docs/observing.md", r"; (\d+) answers at once", http_port.MAX_ANSWERS),
    ("docs/observing.md", r"(\d+) seconds to ask", f"{http_port.CONNECTION_S:g}"),
    ("docs/observing.md", r"; (\d+) KiB for a request's", http_port.MAX_HEAD_BYTES >> 10),
    ("docs/observing.md", r"follows (\d+) others at most", page.MAX_REDUCERS),
    ("docs/observing.md", r"stop at (\d+) MiB", TIMELINE_BYTES >> 20),
    (
        "reducer/cli.py docker/helm/reducer/values.yaml",
        r"other reducer, (\d+)s|drain_timeout, which is (\d+)s",
        f"{DEFAULTS['drain_timeout'].default:g}",
    ),
    (
        "docs/failures.md worker_client/work.py",
        r"a warning after (\d+) s|reducers say after (\d+) s",
        f"{operation.STRAGGLER_S:g}",
    ),
    ("docs/failures.md", r"or does within (\d+) s|more than (\d) seconds", f"{failover.ADOPT_S:g}"),
    ("docs/failures.md", r"theirs every ([\d.]+) s", constants.REDUCER_HEARTBEAT_MS / 1000),
    ("docs/failures.md", r"up to (\d+) s, for both", constants.LONGEST_PATIENCE_MS // 1000),
    ("docs/launchers.md", r"no connection within (\d+) s", f"{zmtp_greeting.TIMEOUT_S:g}"),
)


@pytest.mark.parametrize(("files", "words", "said"), REPEATED)
def test_what_files_repeat_is_so(files, words, said):
    for pattern in files.split():
        found = [
            (str(path.relative_to(ROOT)), match[match.lastindex])
            for path in sorted(ROOT.glob(pattern))
            for match in re.finditer(words, path.read_text(), re.MULTILINE)
        ]
        assert found, f"{pattern} does not say it any more"
        assert [one for one in found if one[1] != str(said)] == []


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
        f"3.{minor}" for minor in MINORS if minor >= int(STABLE)
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
