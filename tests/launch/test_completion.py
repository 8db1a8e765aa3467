"""The shell completes both commands: their options, and the values of options that have few."""

import shutil
import sys
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

import reducer.cli
import worker_client.cli
from reducer.config import ImplName, KernelName
from tests.commands import run_command
from tests.launch.conftest import bare_environment

APPS = {"reducer": reducer.cli.app, "worker-client": worker_client.cli.app}
BIN = Path(sys.executable).parent


def completed(line):
    """Return what the last word of a line may become; a command's options are asked for by -."""
    command, *_ = words = line.split(" ")
    variable = f"_{command.upper().replace('-', '_')}_COMPLETE"
    asking = {variable: "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(APPS[command], env=asking, prog_name=command).stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("reducer ", ["status", "top", "plan", "serve", "keygen"]),
        ("reducer serve --kernel ", get_args(KernelName)),
        ("reducer serve --kernel avx", ["avx512", "avx2"]),
        ("reducer serve --impl ", get_args(ImplName)),
        ("reducer serve --log-", ["--log-level", "--log-format"]),
        ("reducer serve --log-format ", ["text", "json"]),
        ("reducer plan --dtype ", ["fp32", "fp64", "fp16", "bf16", "int8", "fp8_e4m3"]),
        ("worker-client ", ["demo", "launch", "doctor", "timeline"]),
        ("worker-client doctor --", ["--json", "--dump", "--help"]),
        ("worker-client timeline ", ["merge"]),
    ],
)
def test_what_a_line_may_become(line, words):
    assert completed(line) == list(words)


@pytest.mark.extended_cases("reducer")
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("command", "line", "word"),
    [("reducer", "serve --impl pl", "plain"), ("worker-client", "doc", "doctor")],
)
def test_a_shell_has_it_when_it_was_installed(command, line, word, tmp_path):
    environment = bare_environment(HOME=str(tmp_path), PATH=f"{BIN}:/usr/bin:/bin")
    run = {"env": environment, "timeout": 60}
    # Out of a shell: typer looks among the parents of a command for what they are.
    shown, installed = (
        run_command("bash", "-c", f"{BIN / command} --{what}-completion bash; exit $?", **run)
        for what in ("show", "install")
    )
    assert (shown.returncode, installed.returncode) == (0, 0)
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert script.read_text().strip() == shown.stdout.strip()
    assert str(script) in (tmp_path / ".bashrc").read_text()
    last = len(line.split())
    asked = (
        f"source ~/.bashrc; COMP_WORDS=({command} {line}); COMP_CWORD={last}; "
        f"_{command.replace('-', '_')}_completion {command}; echo ${{COMPREPLY[@]}}"
    )
    assert run_command("bash", "-c", asked, **run).stdout.strip() == word
