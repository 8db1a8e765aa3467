"""What the recorded sessions do, at each of two ranks, and what comes of it."""

from typing import NamedTuple

import numpy as np

RIGHT = {
    "sum": np.add,
    "mean": lambda first, second: (first + second) / first.dtype.type(2),
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class Call(NamedTuple):
    """An all-reduce of numbers of which all results are exact.

    Attributes:
        apart: values that rank 1 gives more than rank 0, which is a mismatch.
    """

    dtype: str = "f4"
    count: int = 33
    op: str = "sum"
    name: str | None = None
    apart: int = 0

    def given(self, rank):
        return ((np.arange(self.count + self.apart * rank) + 3 * rank) % 50).astype(self.dtype)

    def right(self):
        return RIGHT[self.op](self.given(0), self.given(1))

    def begin(self, client):
        return client.all_reduce(self.given(client.rank), self.op, name=self.name)


SESSIONS = {
    "dtypes": [Call(dtype, 100) for dtype in ("f4", "f8", "f2", "i1", "i4", "i8", "u1")],
    "operations": [*(Call(op=op) for op in RIGHT), Call(count=0)],
    "chunks": [Call(count=12_000)],
    "names": [Call(name="a"), Call(name="b")],
    "mismatch": [Call(apart=1)],
}
