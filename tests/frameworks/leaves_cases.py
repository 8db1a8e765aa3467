"""One rank of a training with leaves, as docs/leaves.md shows it for a framework.

Started by test_leaves as ``python -m tests.frameworks.leaves_cases SECTION``, a section's title.
"""

import os
import sys
import warnings
from functools import partial
from importlib import import_module

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.small import digest, loss_of
from tests.pages import blocks
from tests.ranks import refusal, write_result

SAMPLES, STEPS, CLIP = 1600, 6, 0.01  # two steps in each of three epochs; all gradients are larger

warnings.filterwarnings("ignore")


class Clipped(torch.optim.SGD):
    """Clips gradients by itself, as Lightning's Trainer is asked to."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], CLIP)
        return super().step(closure)


def layers():
    """A network that draws random numbers; those of rank 0 are all ranks' in the beginning."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))


def samples():
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def on_the_page(section, names):
    """Run what the section shows, and return the fingerprint of the model's weights."""
    (text,) = blocks("docs/leaves.md", "python", section)
    exec(text, names)  # noqa: S102 (the page's own)
    return digest(names["model"])


def by_hand(section):
    model = layers()
    optimizer = Clipped(model.parameters(), lr=0.05, momentum=0.9)
    names = {"model": model, "optimizer": optimizer, "loss": loss_of, "data": samples()}
    if section == "Accelerate":
        names["Accelerator"] = partial(import_module("accelerate").Accelerator, cpu=True)
    return {"weights": on_the_page(section, {**names, "steps": STEPS})}


def by_lightning(section):
    pl = import_module("lightning.pytorch")
    trainers = import_module("tests.frameworks.lightning_trainer")

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def training_step(self, batch):
            x, y = batch
            return loss_of(self.layers(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    model = Net()
    if os.environ["RANK"] != "0":
        nn.init.zeros_(model.layers[0].weight)
    trainer = partial(trainers.make_trainer, pl, gradient_clip_val=CLIP)
    names = {"model": model, "data": samples(), "Trainer": trainer}
    weights = on_the_page(section, names)
    assert names["trainer"].global_step == STEPS
    names["trainer"].fit_loop.max_epochs += 1
    loader = DataLoader(samples(), batch_size=8)
    assert "leaf_loader()" in refusal(names["trainer"].fit, model, loader)
    twice = trainer(strategy=names["LeavesStrategy"](24), accumulate_grad_batches=2)
    assert "take more leaves" in refusal(twice.fit, model, names["loader"])
    return {"weights": weights}


if __name__ == "__main__":
    torch.set_num_threads(1)
    title = sys.argv[1]
    write_result(by_lightning(title) if title == "Lightning" else by_hand(title))
