"""What `docs/generate.py` makes is up to date; what pages say of settings and options is true."""

import ast
import json
import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import reducer.cli
import worker_client.cli
from bench import figures
from reducer.config import ReducerConfig
from tests.versions import ROWS
from worker_client.config import WorkerConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FILES = ("*.md", "docs/**/*.md", "[bf]*/**/README.md", ".github/*.md", ".github/ISSUE_TEMPLATE/*")
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for files in FILES
    for path in ROOT.glob(files)
    if ROOT / "build" not in path.parents
    and path.name != "CHANGELOG.md"  # which names what was renamed since
}
OF_THE_BUILD = {f"REDUCTION_BUILD_{name}" for name in ("DEBUG", "REPOSITORY", "STABLE_ABI")}
COMMANDS = {
    "reducer": get_command(reducer.cli.app).commands,
    "worker-client": get_command(worker_client.cli.app).commands,
}
CODE = re.compile(r"^```sh\n(.*?)^```$|^((?:    .*\n)+)", re.MULTILINE | re.DOTALL)
# The beginning of a line of code, but for a synopsis.
SHOWN = re.compile(
    r"^ *(?:\w+=\S+ |env -u \w+ )*(reducer|worker-client) ([^\n#|&;\[']+)(?!.*\[)", re.MULTILINE
)
# A command of ours and its options: to the end of its line, code or cell, or of what is its own.
COMMAND = re.compile(r"\b(reducer|worker-client) ([a-z]+)((?: +[^\s`|&;#]+)*)")
GENERATOR = runpy.run_path(str(DOCS / "generate.py"))
PAGES = GENERATOR["PAGES"]
MEASURED = GENERATOR["measured"]
FIGURES = sorted((DOCS / "figures").glob("*.json"))
OWN_SOCKETS = "1a649ed1"  # the first commit whose figures are not of libzmq's sockets
# How a performance figure reads in prose; sizes, rates and counts are settings of what is measured.
FIGURE = re.compile(
    r"\d[\d.,]*\s?(?:times|us|ms|s/GB|[MG]B/s|samples/s|%)(?!\w)|(?<![\d.])0\.\d+(?![\d.])"
)
# What is no prose: code, tables, headings, comments and pictures.
NO_PROSE = re.compile(r"^```(?s:.*?)^```$|^(?:    .*|\|.*|#.*|<!--.*-->|!\[.*)$", re.MULTILINE)
SENTENCE_ENDS = re.compile(r"(?<=[.!?:])[\"*)`]*\s+(?=[\"*`(\[]*[A-Z0-9`])|\n\s*\n|\n(?=- |\d+\. )")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_generator_makes(name):
    assert (DOCS / name).read_text() == PAGES[name](), "run: .venv/bin/python docs/generate.py"


def test_what_files_repeat_is_what_is_said_first():
    stale = [str(path) for path, text in GENERATOR["facts"]().items() if path.read_text() != text]
    assert stale == [], "run: .venv/bin/python docs/generate.py"


def test_another_value_reaches_every_file_that_repeats_it():
    found = GENERATOR["facts"]({"port": 7777, "http_connections": 54321, "base": "debian:sid-1"})
    text = {str(path.relative_to(ROOT)): text for path, text in found.items()}
    assert "REDUCTION_SERVERS=127.0.0.1:7777,127.0.0.1:5556" in text["README.md"]
    assert "EXPOSE 7777 9090\n" in text["docker/reducer.Dockerfile"]
    assert "5555" not in "".join(text[name] for name in text if "/templates/" in name)
    assert "at most 54,321\nconnections" in text["docs/observing.md"]
    assert "ARG BASE=debian:sid-1\n" in text["docker/worker.Dockerfile"]


def test_a_sentence_that_says_a_fact_no_more_is_named(monkeypatch):
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read(path).replace("warning after 10", "x"))
    with pytest.raises(LookupError, match=r"failures.md: nothing .*'a warning after \{\} s'"):
        GENERATOR["facts"]()


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_figure_is_of_a_commit_and_a_command(path):
    figure = json.loads(path.read_text())
    assert re.fullmatch(r"[0-9a-f]{8,40}", figure["commit"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", figure["date"])
    assert re.match(r"python -m bench\.\w+", figure["command"])
    assert figure["rows"]
    assert path.stem in figures.FIGURES
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the history of a git checkout")
    assert is_ancestor(figure["commit"], "HEAD")
    # One of another engine says so under its table.
    assert is_ancestor(OWN_SOCKETS, figure["commit"]) == ("libzmq" not in figure.get("note", ""))


def git(*arguments):
    return subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False
    )


def is_ancestor(commit, of):
    ended = git("merge-base", "--is-ancestor", commit, of)
    assert ended.returncode in {0, 1}, ended.stderr
    return not ended.returncode


def test_no_other_figure_stands_in_the_readme_or_in_performance():
    readme = re.sub(r"(?s)<!-- gains:.*<!-- /gains -->", "", TEXTS["README.md"])
    for text in (readme, re.sub(r"(?m)^\{\w+\}$", "", MEASURED.PAGE)):
        assert FIGURE.findall(NO_PROSE.sub("", text)) == []
        assert [line for line in text.splitlines() if line.startswith("|")] == []
    assert {"1.48 times", "53 ms", "0.37", "+2.9 %"} <= set(
        re.findall(rf"\+?(?:{FIGURE.pattern})", "1.48 times 53 ms, 0.37, +2.9 % 10 GB 0.0.0.0")
    )


def test_another_figure_reaches_every_page_that_repeats_it(monkeypatch, tmp_path):
    for path in FIGURES:
        text = path.read_text()
        if path.stem == "pool-4":
            figure = json.loads(text)
            figure["commit"] = "fedcba9876543210"
            for row in figure["rows"]:
                if row["size"] == "64 MiB":
                    row["gloo"] = [7.77, 7.11, 7.99]
            text = json.dumps(figure)
        (tmp_path / path.name).write_text(text)
    monkeypatch.setattr(MEASURED, "FILES", tmp_path)
    made = {name: PAGES[name]() for name in PAGES}
    assert "| 7.77 (7.11 to 7.99) |" in made["performance.md"]
    assert "Commit fedcba98, " in made["performance.md"]
    assert "7.77 times (n=4)" in made["../README.md"]
    assert ">7.77</text>" in made["gain.svg"]


def test_what_hivemind_takes_stands_beside_ours(monkeypatch, tmp_path):
    row = {"way": "NoCompression", "ms": 3210.0, "lowest": 3000.0, "highest": 3300.0}
    row |= {"limit": 0.262, "cpu": 9.87, "matched_ms": 4100.0, "error": 3e-8}
    ours = {"way": "embedded", "ms": 843.0, "lowest": 840.0, "highest": 850.0, "limit": 0.999}
    figure = {"commit": "fedcba9876543210", "date": "2026-12-01", "command": "python -m bench.x"}
    file = tmp_path / "hivemind-1000.json"
    file.write_text(json.dumps({**figure, "rows": [row, {**ours, "cpu": 0.92}]}))
    monkeypatch.setattr(MEASURED, "FILES", tmp_path)
    made = MEASURED.volunteers()
    assert "| hivemind, fp32 | 3,210 (3,000 to 3,300) | 4,100 | 0.262 | 9.87 |" in made
    assert "| ours, embedded, fp32 | 843 (840 to 850) |  | 0.999 | 0.92 |" in made
    assert made[-1].startswith("Commit fedcba98, 2026-12-01: ")


def test_the_site_begins_as_the_readme_does():
    shown = TEXTS["README.md"].partition("\n## Quick start")[0]
    for sentence in SENTENCE_ENDS.split(NO_PROSE.sub("", shown)):
        words = re.sub(r"\]\([^)]*\)", "]", sentence)
        assert words.strip() in re.sub(r"\]\([^)]*\)", "]", TEXTS["docs/index.md"])


DOCUMENTS = sorted(name for name in TEXTS if name.startswith("docs/"))


@pytest.mark.parametrize("page", [name for name in DOCUMENTS if name != "docs/index.md"])
def test_a_page_says_for_whom_it_is(page):
    assert re.match(r"# .+\n\nFor [^.]+(?:\.\w[^.]*)*\.\n\n", TEXTS[page])


@pytest.mark.parametrize("page", TEXTS)
def test_sentences_have_25_words_in_the_mean(page):
    sentences = SENTENCE_ENDS.split(NO_PROSE.sub("", TEXTS[page]))
    lengths = [len(sentence.split()) for sentence in sentences if sentence.strip()]
    assert sum(lengths) <= 25 * len(lengths)


def test_claimed_versions_were_tried_and_no_test_failed():
    results = json.loads((DOCS / "compatibility.json").read_text())
    assert tuple(results) == ROWS, "run: make test-versions"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(project["classifiers"]))
    claimed = {f"3.{minor}" for minor in named}
    passed = {name[:4] for name, one in results.items() if one.get("failed") == 0}
    assert claimed <= passed - {name[:4] for name, one in results.items() if one.get("failed")}
    extras = {text for some in project["optional-dependencies"].values() for text in some}
    (oldest,) = {text.removeprefix("torch>=") for text in extras if text.startswith("torch>=")}
    assert results["3.11 oldest"]["torch"].startswith(f"{oldest}.")


def test_the_settings_tables_are_complete():
    rows = re.findall(r"^\| `REDUCTION_(\w+)` \|.*\. \|$", PAGES["settings.md"](), re.MULTILINE)
    names = [*WorkerConfig.model_fields, *ReducerConfig.model_fields]
    assert sorted(rows) == sorted(name.upper() for name in names)


@pytest.mark.parametrize("page", TEXTS)
def test_settings_that_a_page_names_exist(page):
    settings = {f"REDUCTION_{name.upper()}" for name in WorkerConfig.model_fields}
    settings |= {f"REDUCTION_{name.upper()}" for name in ReducerConfig.model_fields}
    assert set(re.findall(r"\bREDUCTION_[A-Z_]*[A-Z]", TEXTS[page])) <= settings | OF_THE_BUILD


@pytest.mark.parametrize("page", TEXTS)
def test_pages_that_a_page_names_exist(page):
    links = re.findall(r"\]\(([\w./-]+\.md)\b", TEXTS[page])
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).is_file()] == []


def test_messages_that_are_explained_are_said():
    said = [(ROOT / "worker_client" / "runtime" / "_loop.pyx").read_text()]
    files = (path for room in ("reducer", "worker_client") for path in ROOT.glob(f"{room}/**/*.py"))
    for path in (*files, ROOT / "setup.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = (node.value for node in nodes if isinstance(node, ast.Constant))
        said += [text for text in texts if isinstance(text, str)]
    everything = "\n".join(said)
    page = TEXTS["docs/troubleshooting.md"]
    explained = re.findall(r"^\| `([^`]+)`(?! \(of Gloo\))", page, re.MULTILINE)
    assert len(explained) > 20
    parts = (part.strip() for message in explained for part in message.split("…"))
    assert [part for part in parts if part not in everything] == []


@pytest.mark.parametrize("page", TEXTS)
def test_commands_in_code_are_understood(page):
    code = CODE.findall(TEXTS[page].replace("\\\n", " "))
    for program, rest in SHOWN.findall("".join(fenced + indented for fenced, indented in code)):
        verb, *arguments = shlex.split(rest)
        if verb in COMMANDS[program]:  # and not a line that a command has printed
            COMMANDS[program][verb].make_context(verb, arguments)


def test_options_that_pages_name_exist():
    commands = {
        (program, verb): {option for one in command.params for option in one.opts}
        for program, verbs in COMMANDS.items()
        for verb, command in verbs.items()
    }
    named = [
        (program, verb, option, page)
        for page, text in TEXTS.items()
        for program, verb, rest in COMMAND.findall(text.replace("\\\n", " "))
        for option in re.findall(r"(?<= )--[a-z][a-z-]*", rest.partition(" -- ")[0])
    ]
    assert len(named) > 20
    assert [one for one in named if one[2] not in commands.get(one[:2], ())] == []
