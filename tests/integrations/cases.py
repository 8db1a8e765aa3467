"""Runs the cases of a framework at two ranks, in which it is imported once, for one test each.

A module of cases is started at every rank as ``python -m MODULE``, and gives itself to `main`,
which calls its functions named ``case_...`` one after the other, and says how each ended.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from contextlib import ExitStack
from typing import Any

from tests.integrations.training import ROOT

WORLD_SIZE = 2


def names(module: str) -> list[str]:
    """Return the names of a module's cases; does not import it, as that may take long."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return re.findall(r"^def (case_\w+)", path.read_text(), re.MULTILINE)


def main(module: dict[str, Any]) -> None:
    """Call all cases among a module's globals, and print a line for each: name, how it failed."""
    for name, case in module.items():
        if name.startswith("case_"):
            error = None
            try:
                case()
            except BaseException:  # noqa: BLE001 (the test shows it)
                error = traceback.format_exc()
            sys.stdout.write(json.dumps([name, error]) + "\n")
            sys.stdout.flush()


def run(module: str, servers: list[str], **environment: str) -> dict[str, list[str | None]]:
    """Run a module of cases at all ranks.

    Returns:
        What each case says at each rank, in rank order; None for nothing wrong.
    """
    settings = {
        "REDUCTION_SERVERS": ",".join(servers),
        "REDUCTION_JOB": module,
        "REDUCTION_TIMEOUT": "60s",  # one rank may import its framework long after another
        "WORLD_SIZE": str(WORLD_SIZE),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("REDUCTION_")}
    results: dict[str, list[str | None]] = {}
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(WORLD_SIZE)]
        complaints = stack.enter_context(tempfile.TemporaryFile("w+"))
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module],
                    cwd=ROOT,
                    env={**inherited, **settings, "RANK": str(rank)},
                    stdout=out,
                    stderr=complaints,
                )
            )
            for rank, out in enumerate(said)
        ]
        for process in ranks:
            stack.callback(process.kill)
        for process, out in zip(ranks, said, strict=True):
            if process.wait(240) != 0:
                complaints.seek(0)
                raise AssertionError(complaints.read())
            out.seek(0)
            for name, error in map(json.loads, out):
                results.setdefault(name, []).append(error)
    return results
