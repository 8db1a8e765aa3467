"""A small smooth network of torch's, its data, and a fingerprint of its weights."""

import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network(*hidden):
    """Return a network from 8 numbers to one, whose layers of these widths end in a tanh."""
    widths = (8, *hidden)
    layers = [nn.Linear(*pair) for pair in zip(widths, hidden, strict=False)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(hidden[-1], 1))


def data(samples=160, **options):
    """Return batches of 8 samples and their sums."""
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, **options)


def loss_of(outputs, labels):
    return (outputs.float() - labels).square().mean()


def digest(model):
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()
