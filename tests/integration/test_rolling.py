"""The pool is restarted, one reducer after the other, while ranks make calls: none of them fails.

The short form of `bench.rolling`.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest

from bench.rolling import roll

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")


def test_a_rolling_restart_costs_no_call() -> None:
    check(roll(2, 2.0, 50.0, signal.SIGTERM))


@pytest.mark.parametrize("pace", [1.0, 50.0, 500.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_rolling_restarts_at_other_paces(pace: float, number: signal.Signals) -> None:
    check(roll(3, 3.0, pace, number))


def check(said: list[dict[str, Any]]) -> None:
    for rank in said:
        assert rank["errors"] == []
        assert rank["wrong"] == 0
        assert all(rank["in_use"])
