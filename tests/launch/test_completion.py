"""The shell completes both commands: their options, and the values of options that have few."""

import shutil
import sys
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

import reducer.cli
import worker_client.cli
from reducer.config import KernelName
from tests.commands import run_command
from tests.launch.conftest import bare_environment

DOCTOR = [
    *("--json", "--dump", "--pickle", "--gain", "--trace", "--workers", "--gbps", "--reducers"),
    *("--round-trip", "--every", "--steps", "--help"),
]
APPS = {"reducer": reducer.cli.app, "worker-client": worker_client.cli.app}


def completed(line):
    """Return what the last word of a line may become; a command's options are asked for by -."""
    command, *_ = words = line.split(" ")
    variable = f"_{command.upper().replace('-', '_')}_COMPLETE"
    asking = {variable: "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(APPS[command], env=asking, prog_name=command).stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("reducer ", ["status", "top", "plan", "conform", "serve", "health", "keygen"]),
        ("reducer serve --kernel ", get_args(KernelName)),
        ("reducer serve --kernel avx", ["avx512", "avx2"]),
        ("reducer serve --log-", ["--log-level", "--log-format"]),
        ("reducer serve --log-format ", ["text", "json"]),
        ("reducer plan --dtype ", ["fp32", "fp64", "fp16", "bf16", "int8", "fp8_e4m3"]),
        ("worker-client ", ["demo", "launch", "join", "doctor", "conform", "nccl", "timeline"]),
        ("worker-client doctor --", DOCTOR),
    ],
)
def test_what_a_line_may_become(line, words):
    assert completed(line) == list(words)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_shell_has_it_when_it_was_installed(tmp_path):
    command = Path(sys.executable).with_name("worker-client")
    installs = f"{command} --install-completion bash; exit $?"  # typer looks for a shell as parent
    asks = "source ~/.bashrc; COMP_WORDS=(worker-client doc); COMP_CWORD=1; "
    asks += "_worker_client_completion worker-client; echo ${COMPREPLY[@]}"
    environment = bare_environment(HOME=str(tmp_path), PATH=f"{command.parent}:/usr/bin:/bin")
    installed, asked = (
        run_command("bash", "-c", line, env=environment, timeout=60) for line in (installs, asks)
    )
    assert (installed.returncode, asked.stdout.strip()) == (0, "doctor")
