"""Runs a script of cases at every rank, and reads what each rank writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.launch import rank_environment

ROOT = Path(__file__).parents[2]


def run_cases(
    script: str, out: Path, *arguments: str, servers: list[str], **environment: str
) -> list[dict[str, Any]]:
    """Run ``tests/integrations/SCRIPT OUT ARGUMENTS`` as two ranks and return what each wrote.

    They get RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: a launcher that is not torchrun.

    Args:
        script: file name; it writes JSON to OUT.RANK.
        out: beginning of the files' names.
        arguments: the script's further ones.
        servers: reducers to use; empty for an embedded job.
        environment: of all ranks, besides that.
    """
    if servers:
        environment["REDUCTION_SERVERS"] = ",".join(servers)
    given = rank_environment(2, PYTHONPATH=str(ROOT), TQDM_DISABLE="1", **environment)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), str(out), *arguments],
            env={**given, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]
