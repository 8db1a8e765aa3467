"""Train on handwritten digits with Lightning: ``Trainer(strategy="reduction")``.

Run it with ``torchrun --nproc-per-node 2 examples/lightning_digits.py``; with ``--stock`` Gloo
averages the gradients instead.
"""

import hashlib
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import worker_client.lightning  # makes the strategy known

STOCK = "--stock" in sys.argv
warnings.filterwarnings("ignore", module="lightning")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Digits(pl.LightningModule):
    """Two linear layers for 8x8 grey images of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of images (n, 64) and labels (n,)."""
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what Lightning trains with."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


pl.seed_everything(0, verbose=False)  # the same first weights at every rank
pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(digits)
model = Digits()
trainer = pl.Trainer(
    strategy="ddp" if STOCK else worker_client.lightning.NAME,
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True))

with torch.no_grad():
    loss = model.training_step([images, labels])
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
reduced = 0 if STOCK else trainer.strategy.client.bytes_reduced
print(
    f"rank {trainer.global_rank}: loss {loss:.10g}, weights {digest}, {reduced} bytes reduced",
    flush=True,
)
