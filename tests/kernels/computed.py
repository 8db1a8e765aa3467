"""What kernels and casts of the package give for a request of `golden.py`.

Also a program, for a Python that has the package and nothing else of what tests need: it reads
requests, pickled as dictionaries, and writes the results of each variant by its name, pickled, too.
"""

import pickle
import sys

from reducer import kernels
from reducer.wire.constants import DType, ReduceOp
from worker_client.staging import casts


def computed(variant, *, kind, dtype, op, inputs, nbytes, by):
    """Return what `variant` gives for the fields of a request."""
    if kind == "fold":
        out = bytearray(nbytes)
        kernels.select(variant).reduce(inputs, out, DType[dtype], ReduceOp[op])
        return bytes(out)
    its, given = casts.variants().get(variant) or casts.select(), memoryview(inputs[0])
    if kind == "divide":
        values = bytearray(given)
        its.divide(memoryview(values), by, DType[dtype])
        return bytes(values)
    residual = bytearray(inputs[1] if kind == "keep" else b"")
    out = bytearray(nbytes - len(residual))
    if kind == "keep":
        its.narrow_keeping(given, memoryview(residual), memoryview(out), DType[dtype])
    elif kind == "narrow":
        its.narrow(given, memoryview(out), DType[dtype])
    else:
        its.widen(given, memoryview(out), DType[dtype])
    return bytes(out + residual)


if __name__ == "__main__":
    requests = pickle.load(sys.stdin.buffer)  # noqa: S301 (a test wrote it)
    results = {
        variant: [computed(variant, **request) for request in requests]
        for variant in kernels.variants()
    }
    pickle.dump(results, sys.stdout.buffer)
