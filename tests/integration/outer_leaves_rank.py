"""One rank of a DiLoCo over leaves, which says a fingerprint of its weights.

    python -m tests.integration.outer_leaves_rank FIRST LAST FOLDER

It makes the rounds from FIRST to before LAST, and goes on from what ranks have left in FOLDER.
"""

import hashlib
import sys
from pathlib import Path

import torch
from torch import nn

import worker_client
from tests.ranks import write_result
from worker_client.outer.leaves import OuterLeaves

WORKERS, EVERY = 8, 3


def made(dropout=0.3):
    """Return a model and its optimizer."""
    layers = nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6)
    model = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model, optimizer, number, worker):
    """Make a worker's own steps of a round."""
    for step in range(EVERY):
        generator = torch.Generator().manual_seed(1000 * worker + EVERY * number + step)
        x = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.flip(1) * worker).square().mean().backward()
        optimizer.step()


def main():
    first, last, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    model, optimizer = made()
    with worker_client.init() as client:
        if client.rank:
            nn.init.zeros_(model[0].weight)  # rank 0's count
        outer = OuterLeaves(model, optimizer, WORKERS, seed=1)
        if first:
            files = folder.glob(f"{first}-*.pt")
            outer.load_state_dicts(torch.load(file, weights_only=True) for file in files)
        for number in range(first, last):
            for worker in outer.round(number):
                train(model, optimizer, number, worker)
        torch.save(outer.state_dict(), folder / f"{last}-{client.rank}.pt")
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    write_result(hashlib.sha256(flat.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
