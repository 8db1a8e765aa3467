"""One rank of the Horovod tests: runs the cases of a module.

Started by test_horovod as `python -m tests.integration.horovod_rank MODULE` with a launcher's
environment.
"""

import importlib
import sys

import worker_client.horovod as hvd
from tests.integration.cases import run_cases


def main(module):
    hvd.init()
    cases = vars(importlib.import_module(module))
    after = cases.get("twenty_calls_are_right", lambda: None)
    run_cases(cases, after=after, stop=True)
    hvd.shutdown()


main(*sys.argv[1:])
