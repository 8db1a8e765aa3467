"""Models that DDP would cut into small buckets: what `attach` says about them."""

import logging

import pytest

from tests.conftest import joined, local_pool

torch = pytest.importorskip("torch", reason="needs torch")
dist = pytest.importorskip("torch.distributed", reason="needs torch.distributed")


from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import worker_client  # noqa: E402


@pytest.fixture(scope="module")
def client():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with local_pool(1) as servers, joined(1, servers=servers, job="advice") as clients:
            yield clients[0]
    finally:
        dist.destroy_process_group()


LARGE = torch.nn.Linear(4096, 2600)  # 40 MiB of float32, above the default of 25 MiB
FROZEN = torch.nn.Linear(4096, 2600).requires_grad_(False)
SMALL = torch.nn.Linear(8, 8)


def said_about(model, client, caplog):
    with caplog.at_level(logging.WARNING, "worker_client.ddp"):
        worker_client.attach(model, client)
    return [record.getMessage() for record in caplog.records if record.name == "worker_client.ddp"]


def test_a_large_model_in_buckets_of_the_default_size_gets_advice(client, caplog):
    (text,) = said_about(DistributedDataParallel(LARGE), client, caplog)
    assert "40 MiB of gradients go in buckets of 25 MiB" in text
    assert "bucket_cap_mb=64" in text


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (LARGE, {"bucket_cap_mb": 25}),  # a chosen size
        (SMALL, {}),
        (torch.nn.Sequential(FROZEN, SMALL), {}),
    ],
)
def test_others_get_none(client, caplog, layer, options):
    assert not said_about(DistributedDataParallel(layer, **options), client, caplog)
