"""Reducers that ranks host admit the ranks of their job alone, and encrypt if they are told to."""

import pytest

from reducer.errors import ConfigError
from tests.ranks import environments, ranks
from worker_client.client.bootstrap import connect
from worker_client.client.interfaces import addresses

pytest.importorskip("torch", reason="needs torch")

RANK = """
import numpy, torch, torch.distributed as dist, worker_client
from reducer.errors import AuthError
from worker_client.commands.doctor.greeting import greet, split
from worker_client.client.bootstrap import connect
from worker_client.client.interfaces import addresses
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
client = worker_client.init()
for step in range(10):
    works = [client.all_reduce(torch.full((100_000,), float(rank + step)), op="sum")]
    works += [client.all_reduce(torch.ones(10), op="sum", name=name) for name in "ab"]
    assert (works[0].wait(20) == n * (n - 1) / 2 + n * step).all()
    assert all((work.wait(20) == n).all() for work in works[1:])
reducers = client.spec.reducers
print(*(greet(*split(address), timeout_s=20).mechanism for address in reducers))
try:
    alone = dict(rank=0, world_size=1, embedded=False, encrypt=False, job=f"x{rank}")
    connect(servers=reducers, **alone).shutdown()
    print("welcome")
except AuthError as error:
    print("refused:", *(why for why in ("demands a key", "whose secret") if why in str(error)))
dist.barrier()
client.shutdown()
"""


@pytest.mark.parametrize(
    ("exposed", "encrypt", "mechanism", "why"),
    [
        (False, "0", "NULL", "whose secret"),
        (True, "0", "NULL", "whose secret"),
        (True, "1", "CURVE", "demands a key"),
    ],
)
def test_strangers_are_refused_and_all_is_encrypted_if_asked_for(exposed, encrypt, mechanism, why):
    settings = {"REDUCTION_ENCRYPT": encrypt}
    if exposed:  # what makes embedded reducers listen beyond this machine
        if not (there := [its[0] for name, its in addresses().items() if name != "lo"]):
            pytest.skip("this machine has no network")
        settings |= {"REDUCTION_INTERFACE": there[0], "REDUCTION_THREADS": "2"}
    with ranks(environments(2, **settings), "-c", RANK) as job:
        assert job.outputs(150) == [f"{mechanism} {mechanism}\nrefused: {why}\n"] * 2


def test_a_pool_encrypts_by_its_keys_alone():
    with pytest.raises(ConfigError, match="set REDUCTION_KEYS"):
        connect(servers="127.0.0.1:1", rank=0, world_size=1, encrypt=True)
