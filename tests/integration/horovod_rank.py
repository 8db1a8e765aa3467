"""One rank of the Horovod tests: runs the cases of a module, and writes what went wrong.

Started by test_horovod.py as `python horovod_rank.py OUT MODULE` with a launcher's environment.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import worker_client.horovod as hvd


def main(out: str, module: str) -> None:
    hvd.init()
    rank = hvd.rank()
    went: dict[str, str] = {}
    for case in importlib.import_module(f"tests.integration.{module}").CASES:
        try:
            case()
        except Exception:  # noqa: BLE001 (the test shows it)
            went[case.__name__] = traceback.format_exc()
            break  # the ranks may not be at the same call any more
        went[case.__name__] = ""
    Path(f"{out}.{rank}").write_text(json.dumps(went))
    hvd.shutdown()


main(*sys.argv[1:])
