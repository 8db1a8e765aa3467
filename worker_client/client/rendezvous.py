"""What torch.distributed knows of a job, if the process uses it: ranks, and a store to meet in."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol

from reducer.errors import ConfigError, MembershipError, ReductionTimeout
from reducer.units import host_port
from reducer.wire.constants import MAX_JOB_NAME_BYTES
from reducer.wire.job_names import is_owner, owner
from worker_client import config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

    class MakePrivate(Protocol):
        """Makes a group that nothing else uses."""

        def __call__(
            self, timeout_s: float, all_of: Sequence[Sequence[int]], *, backend: str = "gloo"
        ) -> dist.ProcessGroup:
            """Make a group."""


STORE_TIMEOUT_S = 60.0
_joined = [0]  # calls of `current` so far; the same number at every rank, so it names a rendezvous


class Rendezvous:
    """Where all ranks of a process group meet, or some of them.

    Nobody else writes to `store`. `all_of` are ranks of all jobs that meet like this one, this one
    included, if that is known. A rank that has not come yet is waited for `timeout_s`.

    Attributes:
        rank, world_size: among those who meet.
        ranks: what the process group calls them.
        name: what the job is called in addition, if it is one of several of the same name.
        make_private: makes a group of them that nothing else uses, at the same point in every rank,
            if that can be, for what takes so many seconds at most; of Gloo, unless told otherwise.
        backends: that `make_private` can be told, for tensors wherever they may be.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        store: Store,
        *,
        make_private: MakePrivate | None = None,
        all_of: Sequence[Sequence[int]] = (),
        name: str = "",
        timeout_s: float = STORE_TIMEOUT_S,
        backends: str = "gloo",
    ) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.world_size = len(self.ranks)
        self.name = name
        self.backends = backends
        self.make_private: Callable[..., dist.ProcessGroup] | None = None
        if make_private is not None:
            self.make_private = partial(make_private, all_of=all_of or [self.ranks])
        self._make_private = make_private
        self._store = store
        self._timeout_s = timeout_s

    def named(self, job: str) -> str:
        """Return the name of this group's own job, if `job` is what all of them are called."""
        own = f"{job}.{self.name}" if self.name else job
        if len(own.encode()) <= MAX_JOB_NAME_BYTES - len(config.NAMED):
            return own
        digest = hashlib.sha256(own.encode()).hexdigest()
        # A key is bound to the first part.
        return f"{owner(job)}.{digest}" if is_owner(owner(job)) else digest

    def subgroup(
        self, ranks: Sequence[int], *, all_of: Sequence[Sequence[int]] = (), number: int = 1
    ) -> Rendezvous:
        """Return a rendezvous of some of these ranks, this one among them; each is in one.

        Args:
            ranks: as the default process group calls them, in the order of the subgroup.
            all_of: the ranks of all subgroups, so that each can have a group of its own made.
            number: of this division of the ranks into subgroups, whose jobs may live at once.
        """
        from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 (as below)

        store = PrefixStore(f"part/{ranks[0]}", self._store)
        rank = list(ranks).index(self.ranks[self.rank])
        # torch calls its groups "1", "2", and so on.
        own = f"ranks{number}-{ranks[0]}"
        name = f"{self.name}.{own}" if self.name else own
        return Rendezvous(
            rank,
            ranks,
            store,
            make_private=self._make_private if all_of else None,
            all_of=all_of,
            name=name,
            timeout_s=self._timeout_s,
            backends=self.backends,
        )

    def share(self, topic: str, value: str) -> None:
        """Publish this rank's value.

        Raises:
            MembershipError: the store is gone.
        """
        with _store_there():
            self._store.set(f"{topic}/{self.rank}", value)

    def withdraw(self, topic: str) -> None:
        """Take back what this rank has published, when all that need it have read it.

        Raises:
            MembershipError: the store is gone.
        """
        with _store_there():
            self._store.delete_key(f"{topic}/{self.rank}")

    def read(self, topic: str, rank: int) -> str:
        """Wait for a rank's value and return it.

        Raises:
            ReductionTimeout: it did not come in time.
            MembershipError: the store is gone.
        """
        key = f"{topic}/{rank}"
        with _store_there():
            try:
                self._store.wait([key], timedelta(seconds=self._timeout_s))
            except RuntimeError as error:  # of a file's store, torch has no type for a timeout
                if _is_of_network(error):
                    raise
                raise ReductionTimeout(
                    f"rank {self.ranks[rank]} did not join the job within {self._timeout_s:g} s: "
                    "call worker_client.init(), or attach(), on every rank",
                    missing=(self.ranks[rank],),
                ) from None
            return bytes(self._store.get(key)).decode()

    def gather(self, topic: str, value: str) -> list[str]:
        """Publish this rank's value and return those of all ranks, in rank order."""
        self.share(topic, value)
        return [self.read(topic, rank) for rank in range(self.world_size)]

    def gather_made(self, topic: str, make: Callable[[], str]) -> list[str]:
        """Gather what `make` returns at each rank; if it fails at one, no rank waits for its value.

        Raises:
            Exception: `make` raised it at this rank.
            ConfigError: it failed at another one, which the message names.
        """
        try:
            made = make()
        except Exception as error:
            self.share(topic, json.dumps([None, str(error) or type(error).__name__]))
            raise
        values = []
        for rank, told in enumerate(self.gather(topic, json.dumps([made, ""]))):
            value, error_text = json.loads(told)
            if value is None:
                raise ConfigError(f"rank {self.ranks[rank]}: {error_text}")
            values.append(value)
        return values

    @property
    def host(self) -> str | None:
        """The host that keeps the store, as this rank calls it; None of a store in files."""
        store = self._store
        while (inner := getattr(store, "underlying_store", None)) is not None:
            store = inner
        host: str | None = getattr(store, "host", None)
        return host


def nonce_of_torchrun(host: str, port: int, timeout_s: float) -> str:
    """Return what tells torchrun's store from any other; "" if torch is not installed here.

    Two clusters may use the same host name and port, so these do not identify a store. The first
    rank that asks draws the number.

    Args:
        host: of the store.
        port: where it listens, from before the first rank's start.
        timeout_s: how long to wait for it, seconds.

    Raises:
        MembershipError: it does not answer in time.
    """
    try:
        from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 (loads torch)
    except ImportError:
        return ""
    drawn: list[str] = []
    why = "its name could not be resolved: the name server does not answer"

    def draw() -> None:
        nonlocal why
        try:
            socket.getaddrinfo(host.strip("[]"), port)
            why = "no answer"
            # torch would say much of a refused connection, and try again for minutes.
            socket.create_connection((host, port), timeout_s).close()
            store = TCPStore(host, port, is_master=False, wait_for_workers=False)
            drawn.append(store.compare_set("reduction/run", "", secrets.token_hex(8)).decode())
        except socket.gaierror as error:
            why = f"its name could not be resolved: {error.strerror}"
        except (OSError, RuntimeError) as error:
            why = str(error).partition("\n")[0]

    # Of a listener that is no store, torch waits for ever, and Ctrl-C does not end that.
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not drawn:
        raise MembershipError(
            f"torchrun's store at {host_port(host, port)} (MASTER_ADDR, MASTER_PORT) cannot be "
            f"reached: {why}. It tells this run from others: set REDUCTION_JOB to a name that no "
            "other run has, the same at every rank, or unset TORCHELASTIC_USE_AGENT_STORE if this "
            "is no rank of torchrun's"
        )
    return drawn[0]


@contextmanager
def _store_there() -> Iterator[None]:
    """Say what it means that the connection to a store has ended."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_network(error):
            raise
        why = str(error).partition("\n")[0].rstrip(".")
        raise MembershipError(
            f"torch's store, in which the ranks meet, is gone ({why}): rank 0 or the launcher "
            "that keeps it has ended, perhaps because of another rank: look at the output of "
            "the other ranks for the first error"
        ) from None


def _is_of_network(error: RuntimeError) -> bool:
    """Whether an error of a store says that it cannot be reached, and not that time is over."""
    import torch.distributed as dist  # noqa: PLC0415 (as below)

    return isinstance(error, dist.DistNetworkError)


def _private_group(
    timeout_s: float, all_of: Sequence[Sequence[int]], *, backend: str = "gloo"
) -> dist.ProcessGroup:
    import torch.distributed as dist  # noqa: PLC0415 (as below)

    patience = timedelta(seconds=timeout_s)
    made = [dist.new_group(ranks, timeout=patience, backend=backend) for ranks in all_of]
    mine: dist.ProcessGroup
    (mine,) = [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]
    return mine


def current() -> Rendezvous | None:
    """Return the initialised default process group, or None (torch is not imported for it)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    import torch.distributed as dist  # noqa: PLC0415 (only where torch is in use anyway)

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import (  # noqa: PLC0415
        PrefixStore,
        _get_default_store,
    )

    _joined[0] += 1
    # torchrun keeps one store over all its restarts.
    start = config.launch().restarts
    store = PrefixStore(f"reduction/{start}/{_joined[0]}", _get_default_store())
    ranks = range(dist.get_world_size())
    nccl = dist.is_nccl_available() and "nccl" in dist.get_backend_config()
    backends = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    return Rendezvous(dist.get_rank(), ranks, store, make_private=_private_group, backends=backends)
