"""Runs a script's first steps at every rank, and has rank 0 decide what follows from them.

python -m worker_client.commands.join.measure FILE train.py ARGS
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError
from reducer.planning.step_model import advised, predict, ways
from worker_client import config
from worker_client.commands.gain.answer import NOT_ATTACHED
from worker_client.commands.gain.run import AskedGain, of_script

if TYPE_CHECKING:
    from worker_client.commands.gain.answer import Answer

_BY_HAND = (
    "for a slow link export REDUCTION_WIRE_DTYPE=int8 yourself on the first machine, and for "
    "unlike machines REDUCTION_BATCH_SHARES"
)
_NOT_DIVIDED = (
    "The script does not call worker_client.batch_part(): it takes no notice of "
    "REDUCTION_BATCH_SHARES, and faster ranks wait."
)
ALIKE = 0.9  # of the fastest rank's speed: where all are as fast, shares change little
STEPS = 5  # of which nothing is exchanged, after those that warm up


def main(file: str, *script: str) -> None:
    """Write what rank 0 has decided, or why it cannot, as JSON."""
    asked = AskedGain(None, None, 0.0, (), every=50, steps=STEPS, now=False, fewer="")
    divided: list[int] = []  # batches
    batch_part = config.batch_part

    def watched(samples: int) -> range:
        divided.append(samples)
        return batch_part(samples)

    config.batch_part = watched
    try:
        answer = of_script(script, asked, as_json=True)
    except ConfigError as error:
        if config.launch().rank == 0:
            Path(file).write_text(json.dumps({"said": [f"nothing is measured: {error}", _BY_HAND]}))
        return
    if answer is not None:
        Path(file).write_text(json.dumps(decided(answer, divides=bool(divided))))


def decided(answer: Answer, *, divides: bool) -> dict[str, Any]:
    """Return variables: shares of the batch by speeds, and what gradients travel as.

    The wire's type is the one that `doctor --gain` would advise where ranks host reducers and each
    takes its share, so that no rank waits for a slower one.

    Args:
        answer: what was measured.
        divides: whether the script takes its part of a batch by its share.
    """
    speeds, job = answer.speeds, answer.job
    whole = sum(speeds)
    shorter = len(speeds) * min(speeds) / whole  # a step, beside one of equal batches
    buckets = (one._replace(ready_s=one.ready_s * shorter) for one in job.step.buckets)
    step = replace(job.step, compute_s=job.step.compute_s * shorter, buckets=tuple(buckets))
    balanced = replace(job, step=step)
    taken = advised([predict(balanced, way) for way in ways(())])
    sets = {
        "REDUCTION_BATCH_SHARES": ",".join(f"{speed / whole:.4g}" for speed in speeds),
        "REDUCTION_WIRE_DTYPE": taken.way.wire or "none",
    }
    said = [*answer.lines(), *([NOT_ATTACHED] if answer.attached is False else [])]
    if not divides and min(speeds) < ALIKE * max(speeds):
        said.append(_NOT_DIVIDED)
    return {"sets": sets, "said": said}


if __name__ == "__main__":
    main(*sys.argv[1:])
