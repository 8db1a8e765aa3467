"""Reads a training's step from what a run of it has recorded: a timeline, or a profiler's trace.

Both hold when each all-reduce was submitted and when it ended. A step is what repeats: all-reduces
of the same sizes, the first of which is submitted when all before it have ended, as a step needs
the results of the one before. From there to each submission nothing but the network is left out, so
these are the moments at which buckets would be ready with nothing exchanged.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.errors import ConfigError
from reducer.planning.step_model import Bucket, Step
from worker_client.staging.wire_rule import SMALLEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PERIODS = 3  # of a pattern, at least: whatever comes once is no step
LATEST = 3000  # all-reduces that are looked at: of the first steps some take longer
ALIKE = 1.5  # times the shortest step that the longest one takes: else it is no step, or no rest
_ITEMSIZES = {"float": 4, "float32": 4, "double": 8, "c10::half": 2, "c10::bfloat16": 2}
_UNREADABLE = (
    *(OSError, EOFError, zlib.error, ArithmeticError, AttributeError),
    *(LookupError, RecursionError, TypeError, ValueError),
)
_RANK_OF = re.compile(r"rank \d+ of (\d+)")


class _AllReduce(NamedTuple):
    begun_us: float
    ended_us: float
    nbytes: int
    rounded: int  # bytes that a wire type would round


class Recorded(NamedTuple):
    """What a run has recorded.

    Attributes:
        step: with nothing exchanged.
        now_s: a step as it was.
        ranks: how many there were; None if that is not known.
    """

    step: Step
    now_s: float
    ranks: int | None


def read(path: Path) -> Recorded:
    """Read one rank's file.

    Raises:
        ConfigError: it is none, or no steps can be told from it; the message says what to do.
    """
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        ranks, calls = _timeline(found) if isinstance(found, list) else _profile(found)
    except ConfigError:
        raise
    except _UNREADABLE as error:
        raise ConfigError(
            f"{path} is neither a timeline of a rank (REDUCTION_TIMELINE) nor a trace of "
            f"torch.profiler (export_chrome_trace): {error!r}"
        ) from None
    calls = sorted(calls)[-LATEST:]
    for period in range(1, len(calls) // PERIODS + 1):
        if found := _steps(calls, period):
            return Recorded(*found, ranks)
    raise ConfigError(
        f"{path} has {len(calls)} all-reduces in which no {PERIODS} steps are alike: record some "
        "more, of a training without accumulation or evaluation in between"
    )


def _timeline(events: Sequence[dict[str, Any]]) -> tuple[int | None, list[_AllReduce]]:
    calls, ranks = [], None
    for event in events:
        about = event.get("args", {})
        if event["ph"] == "M" and (named := _RANK_OF.match(str(about.get("name")))):
            ranks = int(named[1])
        elif event["ph"] == "X" and "sequence" in about and "error" not in about:
            if about["dtype"].startswith("block"):
                raise ConfigError(
                    "the timeline is of gradients that were rounded already: record it without "
                    "REDUCTION_WIRE_DTYPE"
                )
            calls.append(_call(event, int(about["bytes"]), about["dtype"] == "float32"))
    return ranks, calls


def _profile(trace: dict[str, Any]) -> tuple[int | None, list[_AllReduce]]:
    calls = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event["name"] != "gloo:all_reduce":
            continue
        about = event.get("args", {})
        if not about.get("Input Dims"):
            raise ConfigError(
                "the trace does not say how large all-reduces are: record it with "
                "torch.profiler.profile(record_shapes=True)"
            )
        shape, dtype = about["Input Dims"][0], about["Input type"][0].lower()
        count = 1
        for length in shape:
            count *= int(length)
        calls.append(_call(event, count * _ITEMSIZES[dtype], dtype.startswith("float")))
    if not calls:
        raise ConfigError(
            "the trace has no all-reduces of Gloo, the one backend whose traces say when a bucket "
            "was ready: run the script by worker-client doctor --gain -- train.py"
        )
    ranks = trace.get("distributedInfo", {}).get("world_size")
    return None if ranks is None else int(ranks), calls


def _call(event: dict[str, Any], nbytes: int, float32: bool) -> _AllReduce:
    begun_us = float(event["ts"])
    rounded = nbytes if float32 and nbytes >= SMALLEST_BYTES else 0
    return _AllReduce(begun_us, begun_us + float(event["dur"]), nbytes, rounded)


def _steps(calls: Sequence[_AllReduce], period: int) -> tuple[Step, float] | None:
    """Return a step of so many all-reduces, and how long it was; None if there are no such ones."""
    sizes = [one.nbytes for one in calls]
    alike = next(
        (at for at in range(len(calls) - period - 1, -1, -1) if sizes[at] != sizes[at + period]), -1
    )
    since = alike + 1  # from here on sizes repeat
    if len(calls) - since < PERIODS * period:
        return None
    ended_us = [0.0]  # when all before a call had ended
    for one in calls:
        ended_us.append(max(ended_us[-1], one.ended_us))
    best: tuple[float, list[int]] = (0.0, [])
    for first in range(max(since, 1), since + period + 1):
        begins = [*range(first, len(calls), period)]
        rests = [calls[at].begun_us - ended_us[at] for at in begins]
        lengths = [calls[at + period].begun_us - calls[at].begun_us for at in begins[:-1]]
        if len(lengths) < PERIODS - 1 or max(lengths) > ALIKE * min(lengths):
            continue
        if min(rests) >= 0 and median(rests) > best[0]:
            best = median(rests), begins
    rest_us, begins = best
    if not begins:
        return None
    whole = begins[:-1]
    ready_s = [
        (rest_us + median(calls[at + place].begun_us - calls[at].begun_us for at in whole)) / 1e6
        for place in range(period)
    ]
    buckets = tuple(
        Bucket(ready, one.nbytes, one.rounded)
        for ready, one in zip(ready_s, calls[whole[-1] : whole[-1] + period], strict=True)
    )
    now_us = median(calls[at + period].begun_us - calls[at].begun_us for at in whole)
    return Step(ready_s[-1], buckets), now_us / 1e6
