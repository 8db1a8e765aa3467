"""The pool is restarted, one reducer after the other, while ranks make calls: none of them fails.

The short form of `bench.rolling`.
"""

from __future__ import annotations

import signal
import sys

import pytest

from bench.rolling import roll

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")


@pytest.mark.parametrize("pace", [2.0, 100.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rolling_restart_costs_no_call(pace: float, number: signal.Signals) -> None:
    for said in roll(2, 2.0, pace, number):
        assert said["errors"] == []
        assert said["wrong"] == 0
        assert all(said["in_use"])
