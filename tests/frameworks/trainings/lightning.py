"""Lightning's Trainer, stopped after an epoch, as it resumes no epoch of a plain DataLoader."""

import warnings

import lightning.pytorch as pl
import torch

from tests.frameworks import small
from tests.frameworks.lightning_trainer import make_trainer
from tests.frameworks.resumption import MIDDLE, Trained, main
from worker_client.client.bootstrap import connect
from worker_client.lightning import ReductionStrategy

warnings.filterwarnings("ignore")


class Net(pl.LightningModule):
    """A network that keeps its losses, and a schedule."""

    def __init__(self):
        super().__init__()
        self.layers = small.network(64, 64)
        self.losses = []
        self.bytes_reduced = 0

    def training_step(self, batch):
        x, y = batch
        loss = small.loss_of(self.layers(x), y)
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
    trainer = make_trainer(
        pl,
        strategy,
        max_epochs=part.steps.stop // MIDDLE,
        default_root_dir=part.folder / part.name,
        enable_checkpointing=True,
    )
    saved = next((part.folder / "begun").rglob("*.ckpt")) if part.resumes else None
    trainer.fit(model, small.data(8 * 2 * MIDDLE, shuffle=True), ckpt_path=saved)
    return Trained(model.losses, model.bytes_reduced)


def train_lightning(part):
    return train(part, "ddp" if part.stock else "reduction")


def train_lightning_in_8_bits(part):
    with connect(job="8 bits", wire_dtype="int8") as client:
        return train(part, ReductionStrategy(client=client))


if __name__ == "__main__":
    main(globals())
