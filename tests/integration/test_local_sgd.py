"""What averages weights through a client: they are not rounded, whatever gradients travel as."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.conftest import joined
from worker_client.local_sgd import PeriodicModelAverager


@pytest.mark.parametrize("wire_dtype", ["bf16", "int8", "fp8_e4m3"])
def test_weights_travel_as_they_are(pool, wire_dtype):
    layers = [nn.Linear(80, 80) for _ in range(2)]  # each with weights of its own
    for parameter in (one for layer in layers for one in layer.parameters()):
        parameter.grad = torch.zeros_like(parameter)  # torch averages no others
    first, second = (
        [one.detach().numpy().copy() for one in layer.parameters()] for layer in layers
    )
    expected = [(one + other) / np.float32(2) for one, other in zip(first, second, strict=True)]
    # Torch's class asks for the default process group, and sends nothing through it.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with (
            joined(2, servers=pool, job="local", wire_dtype=wire_dtype) as clients,
            ThreadPoolExecutor(2) as threads,
        ):

            def average(rank):
                averager = PeriodicModelAverager(2, client=clients[rank])
                averager.average_parameters(layers[rank].parameters())

            list(threads.map(average, range(2)))
    finally:
        dist.destroy_process_group()
    for layer in layers:
        for parameter, mean in zip(layer.parameters(), expected, strict=True):
            np.testing.assert_array_equal(parameter.detach().numpy(), mean)
