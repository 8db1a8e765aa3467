"""Lightning's Trainer, stopped after an epoch, as it resumes no epoch of a plain DataLoader."""

import logging
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.resumption import MIDDLE, Trained, main
from worker_client.client.bootstrap import connect
from worker_client.lightning import ReductionEnvironment, ReductionStrategy

warnings.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Net(pl.LightningModule):
    """A network that keeps its losses, and a schedule."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        self.losses = []
        self.bytes_reduced = 0

    def training_step(self, batch):
        x, y = batch
        loss = (self.layers(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_train_end(self):
        client = getattr(self.trainer.strategy, "client", None)
        self.bytes_reduced = client.bytes_reduced if client else 0

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def train(part, strategy):
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(8 * 2 * MIDDLE, 8, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        plugins=[ReductionEnvironment()],
        max_epochs=part.steps.stop // MIDDLE,
        default_root_dir=part.folder / part.name,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = next((part.folder / "begun").rglob("*.ckpt")) if part.resumes else None
    trainer.fit(model, data, ckpt_path=saved)
    return Trained(model.losses, model.bytes_reduced)


def train_lightning(part):
    return train(part, "ddp" if part.stock else "reduction")


def train_lightning_in_8_bits(part):
    with connect(job="8 bits", wire_dtype="int8") as client:
        return train(part, ReductionStrategy(client=client))


if __name__ == "__main__":
    main(globals())
