"""Train on handwritten digits with Accelerate; reducers average the gradients.

Run it with ``torchrun --nproc-per-node 2 examples/accelerate_digits.py``; with ``--stock`` Gloo
averages them instead.
"""

import hashlib
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import worker_client.accelerate

STOCK = "--stock" in sys.argv

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
client = None if STOCK else worker_client.accelerate.attach(accelerator)  # the one line

set_seed(0)  # the same first weights, and the same shuffled order, at every rank
pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(digits)
network = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
model, optimizer, loader = accelerator.prepare(
    network,
    torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
    DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True),
)
for _ in range(3):
    for batch, expected in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(batch), expected))
            optimizer.step()
            optimizer.zero_grad()

with torch.no_grad():
    loss = nn.functional.cross_entropy(network(images), labels)
weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
reduced = 0 if client is None else client.bytes_reduced
print(
    f"rank {accelerator.process_index}: loss {loss:.10g}, weights {digest}, "
    f"{reduced} bytes reduced",
    flush=True,
)
accelerator.wait_for_everyone()  # a rank that hosts a reducer leaves when all have their results
accelerator.end_training()
