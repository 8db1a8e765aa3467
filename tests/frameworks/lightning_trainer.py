"""Trainers of Lightning's at one of a job's ranks, which say nothing."""

import logging
import os

from worker_client.lightning import ReductionEnvironment

for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


def make_trainer(pl, strategy, **options):
    """Return a trainer of `pl`, Lightning by either of its names."""
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        plugins=[ReductionEnvironment()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )
