"""Averagings by quorum of `torture.guarantee`: what ranks have in common after each outer step."""

import hashlib

import torch
from torch._C._distributed_c10d import TCPStore

from worker_client.client.client import Client
from worker_client.outer import OuterOptimizer

WIDTHS = (3, 50)
GRACE_S = 1.0


def decider() -> TCPStore:
    """Return a store for the ranks of a life to decide in, in this process."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Training:
    """A model that learns nothing but noise, and is averaged with those of all ranks but one.

    Args:
        client: of a rank.
        port: of the store.
    """

    def __init__(self, client: Client, port: int) -> None:
        self._model = torch.nn.Linear(*WIDTHS)
        self._outer = OuterOptimizer(
            self._model,
            client,
            every=2,
            fragments=2,
            min_ranks=client.world_size - 1,
            grace=GRACE_S,
            store=TCPStore("127.0.0.1", port, is_master=False),
        )

    def step(self) -> None:
        """Learn, and average.

        Raises:
            ReductionError: of the averaging.
        """
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.01)
        self._outer.step(tokens=float(torch.randint(0, 5, ())))

    def common(self) -> list[tuple[int, int, int]]:
        """Return of each fragment its number, its outer steps, and a hash of what they led to."""
        found = []
        for number, fragment in enumerate(self._outer.state_dict()["fragments"]):
            state = torch.cat([fragment["outer"], fragment["velocity"]]).numpy().tobytes()
            digest = hashlib.blake2b(state, digest_size=8).digest()
            found.append((number, fragment["made"], int.from_bytes(digest, "little")))
        return found
