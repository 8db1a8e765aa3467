"""One rank of the Horovod tests: runs the cases of a module, and writes what went wrong.

Started by test_horovod as `python -m tests.integration.horovod_rank MODULE` with a launcher's
environment.
"""

from __future__ import annotations

import importlib
import sys
import traceback

import worker_client.horovod as hvd
from tests.ranks import write_result


def main(module: str) -> None:
    hvd.init()
    went: dict[str, str] = {}
    for case in importlib.import_module(f"tests.integration.{module}").CASES:
        try:
            case()
        except Exception:  # noqa: BLE001 (the test shows it)
            went[case.__name__] = traceback.format_exc()
            break  # the ranks may not be at the same call any more
        went[case.__name__] = ""
    write_result(went)
    hvd.shutdown()


main(*sys.argv[1:])
