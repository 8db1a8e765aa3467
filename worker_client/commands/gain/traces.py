"""Reads a training's step from what a run of it has recorded: a timeline, or a profiler's trace.

Both hold when each all-reduce was submitted and when it ended. A trace also tells forward passes
apart. In a timeline a step is what repeats: all-reduces of the same sizes, the first of which is
submitted when all before it have ended, as a step needs the results of the one before. From there
to each submission nothing but the network is left out, so these are the moments at which buckets
would be ready with nothing exchanged.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.errors import ConfigError
from reducer.planning.step_model import Bucket, Step
from worker_client.staging.wire_rule import SMALLEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STEPS = 3  # that are alike, at least: whatever comes once is no step
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
        if isinstance(found, list):
            ranks, calls = _timeline(found)
            begins = _repeated(calls)
        else:
            ranks, calls, forwards_us = _profile(found)
            begins = _after(calls, forwards_us)
    except ConfigError:
        raise
    except _UNREADABLE as error:
        raise ConfigError(
            f"{path} is neither a timeline of a rank (REDUCTION_TIMELINE) nor a trace of "
            f"torch.profiler (export_chrome_trace): {error!r}"
        ) from None
    if len(begins) <= STEPS:
        raise ConfigError(
            f"{path} has {len(calls)} all-reduces in which no {STEPS} steps are alike: record some "
            "more, of a training without evaluation in between"
        )
    return Recorded(*_step(calls, begins), ranks)


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
    return ranks, sorted(calls)[-LATEST:]


def _profile(trace: dict[str, Any]) -> tuple[int | None, list[_AllReduce], list[float]]:
    # Gloo's own slices begin when one of its threads has time for them; c10d's when DDP asks.
    asked = _sorted(trace, "c10d::allreduce_")
    done = _sorted(trace, "gloo:all_reduce")
    if not asked or not done:
        raise ConfigError(
            "the trace has no all-reduces of Gloo, the one backend whose traces say when a bucket "
            "was ready: run the script by worker-client doctor --gain -- train.py"
        )
    while done[0]["ts"] < asked[0]["ts"]:  # asked for before the trace begins
        del done[0]
    calls = []
    for event, its in zip(asked, done, strict=False):
        about = its.get("args", {})
        if not about.get("Input Dims"):
            raise ConfigError(
                "the trace does not say how large all-reduces are: record it with "
                "torch.profiler.profile(record_shapes=True)"
            )
        count, dtype = math.prod(map(int, about["Input Dims"][0])), about["Input type"][0].lower()
        event["dur"] = its["ts"] + its["dur"] - event["ts"]
        calls.append(_call(event, count * _ITEMSIZES[dtype], dtype.startswith("float")))
    ranks = trace.get("distributedInfo", {}).get("world_size")
    forwards_us = [float(one["ts"]) for one in _sorted(trace, "DistributedDataParallel.forward")]
    return None if ranks is None else int(ranks), calls[-LATEST:], forwards_us


def _sorted(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = [one for one in trace["traceEvents"] if one.get("ph") == "X" and one["name"] == name]
    return sorted(found, key=lambda one: float(one["ts"]))


def _call(event: dict[str, Any], nbytes: int, float32: bool) -> _AllReduce:
    begun_us = float(event["ts"])
    rounded = nbytes if float32 and nbytes >= SMALLEST_BYTES else 0
    return _AllReduce(begun_us, begun_us + float(event["dur"]), nbytes, rounded)


def _repeated(calls: Sequence[_AllReduce]) -> list[int]:
    """Return which calls begin a step, at equal distances: as of `_step`."""
    sizes, rests_us = [one.nbytes for one in calls], _rests_us(calls)
    for period in range(1, len(calls) // STEPS + 1):
        alike = range(len(calls) - period - 1, -1, -1)
        since = 1 + next((at for at in alike if sizes[at] != sizes[at + period]), -1)
        candidates = [
            [*range(first, len(calls), period)]
            for first in range(max(since, 1), since + period + 1)
        ]
        found = [one for one in candidates if _are_steps(calls, rests_us, one)]
        if found:  # what rests longest before it begins
            return max(found, key=lambda one: median(rests_us[at] for at in one))
    return []


def _are_steps(
    calls: Sequence[_AllReduce], rests_us: Sequence[float], begins: Sequence[int]
) -> bool:
    """Whether each begins when all before it have ended, and takes about as long as the others."""
    lengths = [calls[after].begun_us - calls[at].begun_us for at, after in pairwise(begins)]
    return (
        len(begins) > STEPS
        and max(lengths) <= ALIKE * min(lengths)
        and min(rests_us[at] for at in begins) >= 0
    )


def _after(calls: Sequence[_AllReduce], forwards_us: Sequence[float]) -> list[int]:
    """Return which calls are the first after a forward pass, of the last steps that are alike."""
    passes = [bisect(forwards_us, one.begun_us) for one in calls]
    begins = [at for at in range(1, len(calls)) if passes[at] > passes[at - 1]]
    sizes = [[one.nbytes for one in calls[at:after]] for at, after in pairwise(begins)]
    alike = len(sizes) - next(
        (back for back, one in enumerate(reversed(sizes)) if one != sizes[-1]), len(sizes)
    )
    return begins[alike:]


def _rests_us(calls: Sequence[_AllReduce]) -> list[float]:
    """Return for how long nothing was under way before each call; negative if something was."""
    ended_us = accumulate((one.ended_us for one in calls), max, initial=-math.inf)
    return [one.begun_us - ended for one, ended in zip(calls, ended_us, strict=False)]


def _step(calls: Sequence[_AllReduce], begins: Sequence[int]) -> tuple[Step, float]:
    """Return a step with nothing exchanged, and how long it was; the last begin ends one."""
    *whole, _ = begins
    rests_us = _rests_us(calls)
    rest_us = median(rests_us[at] for at in whole)
    last = calls[whole[-1] : begins[-1]]
    ready_s = [
        (rest_us + median(calls[at + place].begun_us - calls[at].begun_us for at in whole)) / 1e6
        for place in range(len(last))
    ]
    buckets = (Bucket(at, one.nbytes, one.rounded) for at, one in zip(ready_s, last, strict=True))
    now_us = median(calls[after].begun_us - calls[at].begun_us for at, after in pairwise(begins))
    return Step(ready_s[-1], tuple(buckets)), now_us / 1e6
