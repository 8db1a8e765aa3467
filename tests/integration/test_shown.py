"""Each command that README.md and the pages in docs show is run by a test, or a reason is given.

`shown.toml` says what becomes of each. Of those that it gives to a test here, the test takes the
words from there.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.commands import free_ports, run_here
from tests.pages import (
    FINGERPRINT,
    ROOT,
    answer_torchrun,
    blocks,
    finish,
    on_free_ports,
    shell,
    stand_in_for_torchrun,
    wait_for,
)
from tests.waits import eventually

TABLE = tomllib.loads(Path(__file__).with_name("shown.toml").read_text())
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)
# An indented block that begins so is one of commands; others are output, or code in Python.
BEGINS = re.compile(
    r"\s*(?:\$ |sudo |\w+=\S+ )*(?:#!|(?:\S*/)?(?:reducer|worker-client|python3?|torchrun|make|pip"
    r"|docker|podman|buildah|kubectl|helm|gcloud|az|sbatch|srun|mpirun|ssh|scp|curl|sed|eval|export"
    r"|kill|cd|for|apt-get)\s)"
)
WORD = re.compile(r"(?:sudo |\$ )?(?:\w+=\S+ )*(\S+)")


def taken(page, language, block):
    """Whether a test takes this block from the page."""
    for one in TABLE["whole"]:
        if (one["page"], one.get("language", "sh")) == (page, language):
            return block in blocks(page, language, one.get("section", ""))
    return False


def commands(page):
    """The commands that a page shows, but for those of blocks that a test takes from there."""
    text = (ROOT / page).read_text()
    found = [
        block
        for language, block in FENCED.findall(text)
        if language in {"sh", "bash"} and not taken(page, language, block)
    ]
    found += [block for block in INDENTED.findall(FENCED.sub("", text)) if BEGINS.match(block)]
    for block in found:
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            command = re.sub(r"\s+# .*|\s+#$", "", line).strip()
            # What begins with a prompt is followed by what it prints.
            if command and (command.startswith("$ ") or not block.strip().startswith("$ ")):
                yield command


SHOWN = {command: page for page in PAGES for command in commands(page)}
LISTED = [*TABLE["run"].values(), *TABLE["excused"].values()]


def test_each_command_is_run_or_excused():
    known = {command for some in LISTED for command in some}
    of_programs = {one for one in SHOWN if WORD.match(one)[1] in TABLE["programs"]}
    missing = {one: page for one, page in SHOWN.items() if one not in known | of_programs}
    assert missing == {}, "run it in a test, or say why not: tests/integration/shown.toml"
    assert known - SHOWN.keys() == set(), "shown no more"
    assert known & of_programs == set()
    assert {WORD.match(one)[1] for one in of_programs} == set(TABLE["programs"]), "shown no more"


def test_what_is_said_to_run_them_is_there():
    named = [*TABLE["run"], *(one["test"] for one in TABLE["whole"])]
    for name in named:
        path, _, function = name.partition("::")
        assert f"def {function or 'test_'}" in (ROOT / path).read_text(), name
    for one in TABLE["whole"]:
        path = ROOT / one["test"].partition("::")[0]
        assert Path(one["page"]).name in path.read_text(), one
        assert blocks(one["page"], one.get("language", "sh"), one.get("section", "")), one
    for reason in (*TABLE["excused"], *TABLE["programs"].values()):
        for path in re.findall(r"\b(?:tests|docs)/[\w/.-]+\w", reason):
            assert (ROOT / path).exists(), path


def test_another_command_is_found(monkeypatch):
    pages = {"docs/faq.md": "# Q\n\n    reducer frobnicate\n\n```sh\nfrob \\\n  it  # now\n```\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: pages[str(path.relative_to(ROOT))])
    assert sorted(commands("docs/faq.md")) == ["frob it", "reducer frobnicate"]


def mine(request):
    """The commands that the table gives to a test of this file, in its order."""
    path = Path(request.path).relative_to(ROOT)
    return TABLE["run"][f"{path}::{request.function.__name__}"]


def test_plans(request):
    printed = {one: run_here(one) for one in mine(request)}
    for one, done in printed.items():
        assert done.returncode == 0, (one, done.stderr)
    of_sizing = [words.stdout for one, words in printed.items() if SHOWN[one] == "docs/sizing.md"]
    # Rich fills lines up with spaces.
    assert [re.sub(" +$", "", said, flags=re.M) for said in of_sizing] == blocks(
        "docs/sizing.md", "text"
    )


def test_keys_are_made(request, tmp_path, monkeypatch):
    for at, line in enumerate(mine(request)):
        (home := tmp_path / str(at)).mkdir()
        monkeypatch.chdir(home)
        assert run_here(line.replace("~", str(home))).returncode == 0
        job = shlex.split(line)[-1]
        assert (home / "keys" / "jobs" / job).is_dir()
        assert (home / "keys" / "pool").is_dir()


@pytest.fixture
def torchrun(tmp_path, monkeypatch):
    """A folder with a stand-in for torchrun, in which commands and ranks run."""
    pytest.importorskip("torch", reason="needs torch")
    stand_in_for_torchrun(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_folder(folder, *lines, **names):
    """A script of lines that runs in a folder, with names of this machine's."""
    script = "\n".join((f"cd {shlex.quote(str(folder))}", *lines))
    for name, here in {"train.py": "examples/quickstart.py", **names}.items():
        script = script.replace(name, here)
    return on_free_ports(script)


def ends(said, ranks):
    """Check what the ranks of a training have said at its end."""
    found = FINGERPRINT.findall(said)
    assert sorted(int(rank) for rank, *_ in found) == [*range(ranks)], said
    assert len({weights for _, _, weights, _ in found}) == 1
    return found


@pytest.mark.extended("test_each_command_is_run_or_excused")
def test_a_job_of_a_pool_with_keys(request, torchrun):
    keygen, serve, train = mine(request)
    script = in_folder(
        torchrun, keygen, f"{serve} &", train, "kill %1", **{"=host:": "=127.0.0.1:"}
    )
    with shell(script, path=torchrun) as running:
        asked = answer_torchrun(torchrun)
        found = ends(finish(running), ranks=4)
    assert asked.settings["REDUCTION_KEYS"] == "keys/jobs/vision"
    assert {reducers for *_, reducers in found} == {"1"}


@pytest.mark.extended("tests/integration/test_topologies.py")
def test_a_mixed_job(request, torchrun):
    with shell(in_folder(torchrun, *mine(request)), path=torchrun) as running:
        asked = answer_torchrun(torchrun)
        found = ends(finish(running), ranks=3)
    assert asked.settings["REDUCTION_EMBEDDED"] == "1"
    assert {reducers for *_, reducers in found} == {"4"}


def test_a_reducer_of_a_file_and_a_log_of_objects(request, tmp_path):
    with_file, as_objects = mine(request)
    (settings,) = blocks("docs/deployment.md", "toml")
    address, http, other = (f"127.0.0.1:{port}" for port in free_ports(3))
    settings = settings.replace('"/etc/reducer/keys/pool"', f'"{tmp_path}/keys/pool"')
    settings = settings.replace("0.0.0.0:5555", address).replace("9090 ", f'"{http}" ', 1)
    (tmp_path / "reducer.toml").write_text(settings)
    assert run_here(f"reducer keygen {tmp_path}/keys --job vision").returncode == 0
    script = [
        f"{with_file} &".replace("/etc/reducer", str(tmp_path)),
        f"REDUCTION_BIND=tcp://{other} {as_objects} &".replace("/var/log", str(tmp_path)),
        f"until test -e {tmp_path}/enough; do sleep 0.02; done; kill $(jobs -p); wait",
    ]
    with shell("\n".join(script)) as running:
        for each in (address, http, other):
            wait_for(each)
        log = tmp_path / "reducer.json"
        eventually(lambda: '"event": "reducer ready on' in log.read_text())
        (tmp_path / "enough").touch()
        said = finish(running)
    assert "threads=2" in said
    assert said.count("stopped") == 2, said


@pytest.mark.extended("test_each_command_is_run_or_excused")
def test_what_shows_a_pool_and_a_job(request, torchrun):
    timeline, dump, status, top, health, merge, report, doctor = mine(request)
    here = {"HOST:9090,HOST:9090": "127.0.0.1:9090,127.0.0.1:9091"}
    script = in_folder(
        torchrun,
        "reducer serve --bind tcp://127.0.0.1:5555 --http 9090 --timeline timelines &",
        "reducer serve --bind tcp://127.0.0.1:5556 --http 9091 --timeline timelines &",
        "export REDUCTION_SERVERS=127.0.0.1:5555,127.0.0.1:5556",
        *(timeline, dump),
        *(status.removesuffix(" [--json]"), status.replace("[--json]", "--json")),
        f"{top} --interval 0.2 --count 2",
        f"{health} --http 9090",
        "kill $(jobs -p)",
        *(merge, report, doctor),
        **here,
    )
    with shell(script, path=torchrun) as running:
        asked = [answer_torchrun(torchrun) for _ in range(2)]
        said = finish(running)
    assert [one.arguments[1] for one in asked] == ["4", "4"]
    assert said.count(" serving ") == 2 * (1 + 2)
    assert (torchrun / "timeline.json").exists()
    assert "Where the time went" in (torchrun / "report.html").read_text()
    assert sorted(path.name for path in (torchrun / "dumps").rglob("calls-*")) == [
        f"calls-{rank}.json" for rank in range(4)
    ]
