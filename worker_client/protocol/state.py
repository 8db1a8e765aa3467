"""What callers' threads read and write in every all-reduce: compiled, where that could be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_client.protocol import plain_state as chosen
else:
    try:
        from worker_client.protocol import _state as chosen
    except ImportError:
        from worker_client.protocol import plain_state as chosen

CallMeter = chosen.CallMeter
DriverState = chosen.DriverState
MeteredCall = chosen.MeteredCall
NumberingState = chosen.NumberingState
OperationState = chosen.OperationState
PendingState = chosen.PendingState
PlanState = chosen.PlanState
SessionState = chosen.SessionState
