"""Losses of a training that stops in the middle and resumes, and of one over a stock backend.

A module of trainings is started at every rank as ``python -m MODULE PART FOLDER``, once for each of
three parts, and gives itself to `main`: the whole training over what its framework uses otherwise;
the first half of the same through reducers, with a checkpoint at its end; and the second half, by
new processes, from that checkpoint.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from tests.ranks import environments, ranks, write_result
from worker_client.commands.demo.ranks import free_port

STEPS, MIDDLE = 8, 4
PARTS = {"stock": (0, STEPS), "begun": (0, MIDDLE), "resumed": (MIDDLE, STEPS)}


class Part(NamedTuple):
    """What the processes of one start do of a training.

    Attributes:
        name: one of `PARTS`.
        folder: for the training's checkpoint, the same for all parts and ranks.
    """

    name: str
    folder: Path

    @property
    def stock(self):
        """Whether to train without reducers."""
        return self.name == "stock"

    @property
    def begins(self):
        """Whether to write a checkpoint at the end."""
        return self.name == "begun"

    @property
    def resumes(self):
        """Whether to read a checkpoint first."""
        return self.name == "resumed"

    @property
    def steps(self):
        """The numbers of the steps to make."""
        return range(*PARTS[self.name])


class Trained(NamedTuple):
    """What a part has come to at one rank.

    Attributes:
        losses: of this rank's batch in each step, before the step.
        bytes_reduced: what went through reducers.
    """

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
            seen[training] = train(Part(name, own))
    write_result(seen)


def run(module, servers, folder, workers, *, fresh):
    """Return what all parts of a module's trainings have come to, by training and part.

    Args:
        module: in this package's ``trainings``.
        servers: reducers.
        folder: for checkpoints.
        workers: number of ranks.
        fresh: whether the ranks must not be forks of a process that has imported torch.
    """
    command = ("-m", f"tests.frameworks.trainings.{module}")
    seen = {}
    for part in PARTS:
        # Where a framework's own runtime meets.
        hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(workers))
        given = environments(workers, servers, STOCK_HOSTS=hosts, REDUCTION_TIMEOUT="60s")
        if fresh:  # no process group gives the job a name
            given = [{**rank, "REDUCTION_JOB": f"{module}-{part}"} for rank in given]
        with ranks(given, *command, part, folder, fresh=fresh) as job:
            for result in job.results(90):
                for training, trained in result.items():
                    of_part = seen.setdefault(training, {}).setdefault(part, [])
                    of_part.append(Trained(*trained))
    return seen
