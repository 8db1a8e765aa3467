"""A site of the test of `OuterCallback`: trains a small GPT-2 with a Trainer of its own.

Started by test_outer_callback as ``python -m tests.frameworks.outer_cases FOLDER``, with the site's
number in the environment as SITE.
"""

import os
import sys
from pathlib import Path

import torch

import worker_client
from tests.frameworks.resumption import STEPS
from tests.frameworks.trainings.transformers import Stop, trainer_of
from tests.ranks import refusal, write_result
from worker_client.outer.trainer import OuterCallback

SITE, SITES = int(os.environ["SITE"]), 2
PLAIN = {"lr": 1.0, "momentum": 0.0}  # the mean of the sites' weights
EVERY = 3  # so that a checkpoint in the middle has weights and momentum of the site's own


def weights_of(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])


class Site:
    """A site with one client for all of its trainings; `folder` is for their checkpoints."""

    def __init__(self, folder):
        self.folder = folder
        self.client = worker_client.init(rank=SITE, world_size=SITES)

    def train(self, name, resume=None, stop=(), **outer):
        """Train on the site's half of the texts; return weights, and how often they were sent."""
        trainer = trainer_of(self.folder / name, stop)
        trainer.train_dataset = trainer.train_dataset[SITE::SITES]
        if outer:
            trainer.add_callback(OuterCallback(trainer.model, self.client, **outer))
        before = self.client.bytes_reduced
        trainer.train(resume_from_checkpoint=resume)
        weights = weights_of(trainer.model)
        sent = (self.client.bytes_reduced - before) / weights.nbytes
        return {"weights": weights.tolist(), "sent": sent}

    def refused(self):
        """What is said to a Trainer that chooses a model at its end."""
        trainer = trainer_of(self.folder / "refused", ())
        trainer.args.load_best_model_at_end = True
        trainer.add_callback(OuterCallback(trainer.model, self.client, every=EVERY))
        return refusal(trainer.train)


def main():
    """Write the results of all trainings."""
    folder = Path(sys.argv[1], str(SITE))
    site = Site(folder)
    seen = {
        "alone": site.train("alone"),
        "mean": site.train("mean", every=STEPS, **PLAIN),
        "whole": site.train("whole", every=EVERY),
        "begun": site.train("begun", stop=[Stop()], every=EVERY),
    }
    (checkpoint,) = folder.glob("begun/checkpoint-*")
    seen["resumed"] = site.train("begun", resume=str(checkpoint), every=EVERY)
    seen["refused"] = site.refused()
    site.client.shutdown()
    write_result(seen)


if __name__ == "__main__":
    main()
