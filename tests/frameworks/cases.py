"""Runs the cases of a framework at two ranks, in which it is imported once, for one test each.

A module of cases is started at every rank as ``python -m MODULE``, and gives itself to `main`,
which calls its functions named ``case_...`` one after the other, and says how each ended.
"""

import json
import sys
import traceback

from tests.ranks import environments, ranks


def main(module):
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


def run(module, servers, **environment):
    """Run a module of cases at all ranks.

    Returns:
        What each case says at each rank, in rank order; None for nothing wrong.
    """
    settings = {
        "REDUCTION_JOB": module,
        "REDUCTION_TIMEOUT": "60s",  # one rank may import its framework long after another
        **environment,
    }
    results = {}
    # Forks would have torch, and cases check that the adapters do without it.
    with ranks(environments(2, servers, **settings), "-m", module, fresh=True) as job:
        for said in job.outputs(240):
            for name, error in map(json.loads, said.splitlines()):
                results.setdefault(name, []).append(error)
    return results
