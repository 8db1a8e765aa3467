"""One rank of the Horovod tests: runs the cases of a module, and writes what went wrong.

Started by test_horovod as `python -m tests.integration.horovod_rank MODULE` with a launcher's
environment.
"""

import importlib
import sys
import traceback

import worker_client.horovod as hvd
from tests.ranks import case_names, write_result


def main(module):
    hvd.init()
    went = {}
    cases = importlib.import_module(module)
    for name in case_names(module):
        try:
            getattr(cases, name)()
            getattr(cases, "twenty_calls_are_right", lambda: None)()
        except Exception:  # noqa: BLE001 (the test shows it)
            went[name] = traceback.format_exc()
            break  # the ranks may not be at the same call any more
        went[name] = ""
    write_result(went)
    hvd.shutdown()


main(*sys.argv[1:])
