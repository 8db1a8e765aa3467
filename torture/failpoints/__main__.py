"""``python -m torture.failpoints FAILPOINTS MODULE ...``: a module with failpoints around it."""

import runpy
import sys

from torture.failpoints import parse, reducers, workers

if __name__ == "__main__":
    _, failpoints, module, *arguments = sys.argv
    try:
        points = parse(failpoints)
    except ValueError as error:
        print(f"failpoints: {error}", file=sys.stderr)
        sys.exit(2)
    reducers.install(points)
    workers.install(points)
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
