"""How a rank of `torture.guarantee` tells whether the result of a call is right."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from torture import guarantee_oracle as oracles
from torture.guarantee_oracle import Oracle, Shape
from torture.guarantee_plan import Call, Plan

NEAR = 20  # steps before and after, among which a wrong result is looked for


class Judge:
    """Compares results with those that the oracle has, given the plan of all calls.

    Attributes:
        exact: whether values are small whole numbers, and any NaN is as good as any other.
        nodes: of each rank; ranks of one node fold first. None: no hierarchy.
        elastic: whether results may be those of some ranks, the same at all of them.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        data: str,
        *,
        exact: bool,
        nodes: tuple[int, ...] | None,
        elastic: bool,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._exact = exact
        self._nodes = nodes
        self._elastic = elastic
        self._oracle = Oracle(data, exact=exact)
        self._everybody = tuple(range(plan.ranks))
        self._latest = self._everybody  # whose contributions were in a result

    def take_in(self, world_size: int, present: tuple[int, ...]) -> None:
        """Take note of how many ranks there have ever been, and of whom results are to be."""
        self._everybody, self._latest = tuple(range(world_size)), present

    def contribution(self, call: Call) -> Any:
        """Return a new array with what this rank brings to a call; of bfloat16, its bits."""
        return self._oracle.contribution(call, self._rank)

    def judge(self, call: Call, got: Any, residual: Any, present: tuple[int, ...]) -> str:
        """Say what is wrong with a result; nothing if it is right.

        `residual` is what the call was given, as it is now; `present` are the ranks that take part,
        as the client says. Results are contiguous; of bfloat16, their bits.
        """
        absent = None
        if call.trouble is not None and call.trouble.forbids:
            absent = call.trouble.rank
        if absent is not None and not self._elastic:
            return "a result, where there can be none"
        if absent == self._rank:
            # Calls with names have a membership of their own, which may have lost more by now.
            alone = call.name is not None or present == (absent,)
            return "" if alone else f"a result beside {present}, who asked for another one"
        whose = self.whose(call, got)
        if not whose:
            return self._explain(call, got)
        if absent in whose and not self._search(call, got, without=absent):
            return f"a result of {whose}, with one that took no part"
        if residual is not None:
            kept = oracles.kept(call, self.contribution(call), self._plan.wire_dtype)
            if not np.array_equal(residual, kept):
                return "the residual is not what the cast took away"
        return ""

    def whose(self, call: Call, got: Any) -> tuple[int, ...]:
        """Return whose contributions a result has; nobody's if it is wrong."""
        if self._is(call, got, self._latest):
            return self._latest
        if self._elastic and (found := self._search(call, got)):
            self._latest = found
            return found
        return ()

    def _is(self, call: Call, got: Any, ranks: Iterable[int]) -> bool:
        right = self._oracle.result(call, self._shape(tuple(ranks)))
        return oracles.same(got, right, call.dtype, any_nan=self._exact)

    def _shape(self, ranks: tuple[int, ...]) -> Shape:
        groups: tuple[tuple[int, ...], ...] = (ranks,)
        if (nodes := self._nodes) is not None:
            order = dict.fromkeys(nodes)
            groups = tuple(tuple(rank for rank in ranks if nodes[rank] == node) for node in order)
        return Shape(groups, self._plan.wire_dtype)

    def _search(self, call: Call, got: Any, without: int | None = None) -> tuple[int, ...]:
        """Return whose reduction it is, this rank among them; nobody's if there are none such."""
        others = [rank for rank in self._everybody if rank != without]
        for size in range(len(others), 0, -1):
            for ranks in itertools.combinations(others, size):
                if self._rank in ranks and self._is(call, got, ranks):
                    return ranks
        return ()

    def _explain(self, call: Call, got: Any) -> str:
        """Say how a result is wrong, and, if that can be found out, what it is instead."""
        right = self._oracle.result(call, self._shape(self._everybody))
        where = np.flatnonzero(right.view(f"u{right.itemsize}") != got.view(f"u{got.itemsize}"))
        said = f"{where.size} of {right.size} elements differ"
        if where.size:
            at = int(where[0])
            brought = [self._oracle.contribution(call, rank)[at].item() for rank in self._everybody]
            said += f"; the first at {at}: {got[at]!r}, not {right[at]!r}, of {brought}"
            said += f"; the last at {int(where[-1])}"
        if not self._nodes and (ranks := self._search(call, got)):
            said += f"; it is the reduction of ranks {ranks}"
        thread, step, _ = call.key
        for number in range(max(0, step - NEAR), step + NEAR):
            for other in self._plan.step(thread, number):
                alike = call._replace(key=other.key)
                if other.key != call.key and self._is(alike, got, self._everybody):
                    said += f"; it is the result of call {other.key}"
        return said
