"""`worker-client nccl`: what a shell is to export, and what NCCL will do here."""

import subprocess

import pytest

from reducer.errors import ConfigError
from tests.commands import run_here
from worker_client.commands import nccl
from worker_client.config import load

pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A plug-in whose path a shell would take for two words."""
    library = tmp_path / "a folder" / "plugin.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(nccl, "LIBRARY", library)
    return library


def test_a_shell_understands_what_is_exported(built, capsys):
    assert nccl.nccl(check=False) == 0
    shell = f'{capsys.readouterr().out}\nprintf "%s\n" "$NCCL_NET_PLUGIN" "$NCCL_COLLNET_ENABLE"'
    told = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == [str(built), "1"]


def test_functions_have_algorithms_where_nccl_knows_that(built):
    assert nccl.exports((2, 26))["NCCL_ALGO"] == "allreduce:collnetchain"
    assert "NCCL_ALGO" not in nccl.exports((2, 20))


def test_what_was_not_built_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(nccl, "LIBRARY", tmp_path / "none.so")
    with pytest.raises(ConfigError, match="was not built"):
        nccl.exports(None)


def test_each_nccl_takes_the_newest_tables_that_it_knows(tmp_path, monkeypatch):
    source = "int " + ", ".join(f"ncclCollNetPlugin_v{table}" for table in (8, 9, 10)) + ";"
    library = tmp_path / "plugin.so"
    command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", library]
    subprocess.run(command, input=source, text=True, check=True)
    monkeypatch.setattr(nccl, "LIBRARY", library)
    for version, takes in {(2, 20): 8, (2, 23): 8, (2, 24): 9, (2, 27): 10, (2, 30): 10}.items():
        monkeypatch.setattr(nccl, "nccl_version", lambda version=version: version)
        found = next(nccl.findings(load()))
        assert (f"version {takes} of" in found.text, found.prevents) == (True, False)
    monkeypatch.setattr(nccl, "nccl_version", lambda: (2, 19))
    assert next(nccl.findings(load())).prevents


def test_what_prevents_it_is_said(built, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(nccl, "nccl_version", lambda: None)
    found = list(nccl.findings(load(on_rank_lost="continue")))
    said = " ".join(one.text for one in found if one.prevents)
    assert "there is no NCCL" in said
    assert "REDUCTION_ON_RANK_LOST=continue" in said
    assert "nodes, as the launcher says: 1" in said


def test_the_command_exits_1_where_it_cannot_be():
    done = run_here("worker-client nccl --check")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "NCCL cannot send all-reduces through reducers here"
