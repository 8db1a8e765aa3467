"""One rank of the tests of local SGD: trains as a snippet of docs/frameworks.md says.

Started by test_local_sgd as ``python -m tests.frameworks.local_sgd_cases CASE``. Where the
environment names no reducers, the same is done over Gloo.
"""

import os
import re
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.frameworks.small import network
from tests.ranks import ROOT, write_result
from worker_client import torch_backend

warnings.filterwarnings("ignore")
RANK = int(os.environ["RANK"])
OVER_GLOO = "REDUCTION_SERVERS" not in os.environ
PAGE = (ROOT / "docs" / "frameworks.md").read_text()


def snippet(title):
    """Return the snippet that follows these words in bold, over Gloo if there are no reducers."""
    code = PAGE.partition(f"\n**{title}**")[2].partition("\n```python\n")[2].partition("\n```\n")[0]
    assert code, f"docs/frameworks.md has no snippet of {title}"
    if OVER_GLOO:
        code = code.replace('"reduction"', '"gloo"')
        code = re.sub(r"^client = worker_client.accelerate.attach.*\n", "", code, flags=re.M)
    return code


class Training:
    """A small network with its optimizer and batches, and what snippets make of them.

    `names` is what the snippets take for granted, and what they have defined; `counted` is what
    `count` returned after each of the steps, the last four of which are no whole period.
    """

    def __init__(self, steps=18):
        torch.manual_seed(0)
        self.steps = steps
        self.network = network(16)
        self.count = self._count
        self.counted = []
        self.names = {
            "torch": torch,
            "dist": dist,
            "network": self.network,
            "optimizer": torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9),
            "loss_of": nn.functional.mse_loss,
            "batches": self.batches(),
            "DistributedDataParallel": DistributedDataParallel,
            "PeriodicModelAverager": averagers.PeriodicModelAverager,
            "PostLocalSGDState": PostLocalSGDState,
            "post_localSGD_hook": post_localSGD_hook,
            "PostLocalSGDOptimizer": PostLocalSGDOptimizer,
        }

    def batches(self):
        generator = torch.Generator().manual_seed(RANK + 1)
        for _ in range(self.steps):
            inputs = torch.randn(8, 8, generator=generator)
            yield [inputs, inputs.sum(dim=1, keepdim=True)]
            self.counted.append(self.count())

    def _count(self):
        client = self.names.get("client")
        return torch_backend.bytes_reduced() if client is None else client.bytes_reduced

    def run(self, code, **names):
        self.names.update(names)
        exec(compile(code, "docs/frameworks.md", "exec"), self.names)  # noqa: S102 (our own page)

    def train(self):
        """Make the steps of a model and an optimizer that a snippet has made."""
        model, optimizer = self.names["model"], self.names["optimizer"]
        for inputs, labels in self.names["batches"]:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), labels).backward()
            optimizer.step()

    def end(self):
        return {
            "weights": [w for p in self.network.parameters() for w in p.flatten().tolist()],
            "bytes": sum(p.nbytes for p in self.network.parameters()),
            "counted": self.counted,
            "total": self.count(),
        }


def averager():
    training = Training()
    training.run(snippet("PyTorch's averagers"))
    return training.end()


def post_local():
    training = Training()
    training.run(snippet("Post-local SGD"))
    training.train()
    return training.end()


def post_local_attached():
    """Train with a client in a job whose process group is Gloo's."""
    training = Training()
    before = snippet("Post-local SGD").replace('"reduction"', '"gloo"')
    if OVER_GLOO:
        training.run(before)
    else:
        for line in ("model.register_comm_hook", "optimizer = "):
            before, changed = re.subn(rf"^{line}.*\n?", "", before, flags=re.M)
            assert changed == 1
        training.run(before)
        training.run(snippet("Post-local SGD with a client"))
    training.train()
    return training.end()


def accelerated():
    from accelerate import Accelerator  # noqa: PLC0415 (it takes seconds)
    from accelerate.local_sgd import LocalSGD  # noqa: PLC0415

    training = Training()
    training.run(snippet("Accelerate's LocalSGD"), Accelerator=Accelerator, LocalSGD=LocalSGD)
    return training.end()


def lightning():
    import lightning.pytorch as pl  # noqa: PLC0415

    from tests.frameworks.lightning_trainer import make_trainer  # noqa: PLC0415

    training = Training()

    class Registered(pl.strategies.DDPStrategy):
        """Lightning's own, which registers its hook without CUDA, too."""

        def _register_ddp_hooks(self):
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = training.network

        def training_step(self, batch):
            return nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return training.names["optimizer"]

        def on_train_start(self):
            training.names["client"] = getattr(self.trainer.strategy, "client", None)

        def on_train_batch_end(self, *_):
            training.counted.append(training.count())

    code = snippet("Lightning's model averaging")
    if OVER_GLOO:
        code = re.sub(r"^from worker_client.*\n", "", code, flags=re.M)
        training.names["ReductionStrategy"] = Registered
    training.run(code)
    batches = list(training.batches())
    training.counted.clear()
    strategy = training.names["strategy"]
    trainer = make_trainer(pl, strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))
    return training.end()


def streaming():
    """Train fragments in turn with torchft's manager, of which this rank is a replica."""
    import torchft.local_sgd  # noqa: PLC0415

    from worker_client.torchft import ProcessGroupReduction  # noqa: PLC0415

    training = Training(steps=16)  # each fragment has come home twice
    timeout = timedelta(seconds=60)
    group = (torchft.ProcessGroupGloo if OVER_GLOO else ProcessGroupReduction)(timeout)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=group,
        load_state_dict=training.network.load_state_dict,
        state_dict=training.network.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,  # otherwise one gets the other's weights, of whichever step it is in
        replica_id=f"replica-{RANK}-",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )

    def count():
        client = getattr(group._pg, "client", None)  # none before the first quorum, nor over Gloo
        return 0 if client is None else client.bytes_reduced

    training.count = count
    training.run(snippet("torchft's DiLoCo"), torchft=torchft, manager=manager)
    seen = training.end()
    manager.shutdown()
    return seen


CASES = {
    case.__name__: case
    for case in (
        averager,
        post_local,
        post_local_attached,
        accelerated,
        lightning,
        streaming,
    )
}
write_result(CASES[sys.argv[1]]())
if dist.is_initialized():
    dist.barrier()
