"""Losses of a training that stops in the middle and resumes, and of one over a stock backend.

A module of trainings is started at every rank as ``python -m MODULE PART FOLDER``, once for each of
three parts, and gives itself to `main`: the whole training over what its framework uses otherwise;
the first half of the same through reducers, with a checkpoint at its end; and the second half, by
new processes, from that checkpoint.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from tests.ranks import write_result

STEPS, MIDDLE = 8, 4
PARTS = {"stock": (0, STEPS), "begun": (0, MIDDLE), "resumed": (MIDDLE, STEPS)}


class Part(NamedTuple):
    """What the processes of one start do of a training."""

    folder: Path  # for its checkpoint, the same for all parts and ranks
    steps: range
    stock: bool  # without reducers
    begins: bool  # and writes a checkpoint at the end
    resumes: bool  # from that


class Trained(NamedTuple):
    """Losses of this rank's batch before each step, and what went through reducers."""

    losses: list[float]
    bytes_reduced: int


def main(module):
    """Do a part of all trainings among a module's globals: its functions ``train_...``."""
    name, folder = sys.argv[1:]
    seen = {}
    for training, train in module.items():
        if training.startswith("train_"):
            own = Path(folder, training)
            own.mkdir(exist_ok=True)
            seen[training] = train(Part(own, range(*PARTS[name]), *(name == one for one in PARTS)))
    write_result(seen)
