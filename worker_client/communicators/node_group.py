"""What the ranks of one node say and give each other.

Words, and data in host memory, go through process groups of Gloo's, data on GPUs through NCCL's.
These tell nobody who is missing. So each rank has a page of memory that the others read, with how
far it has come and why it gives up, and watches the processes of the others.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
import secrets
import select
import struct
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reducer.errors import (
    ConfigError,
    LocalProtocolError,
    RankLostError,
    ReductionError,
    ReductionTimeout,
)
from reducer.wire.messages import decode_error, encode_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

IN, OUT = 0, 1  # the two ways of a call
MESSAGE_BYTES = PAGE_BYTES = 8192  # of what a rank says, so that nobody has to say how much it is
GRACE_S = 0.5  # for what is complete at a rank that has left to be complete here as well
GONE_S = 1.0  # after a connection has ended: for its process to end, or a reason to come
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3  # between two looks whether it is done
# As torch calls it since 2.13, and before.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NodePages:
    """Memory of which each rank of a node writes a page, and reads those of the others.

    Nobody has to answer: what a rank has written can be read when it is stopped, or has ended.

    Args:
        ranks: of this node, in local-rank order.
        local_rank: of this process.
        gather: publishes a text, waits for those of all ranks of the node, and returns them.

    Raises:
        ConfigError: a rank cannot be reached.
    """

    _HEAD = struct.Struct("<16s2QI")  # a nonce, how far its rank is each way, length of a reason
    _FAR, _LENGTH = 16, 32  # where these begin

    def __init__(
        self, ranks: Sequence[int], local_rank: int, gather: Callable[[str], Sequence[str]]
    ) -> None:
        self.ranks = tuple(ranks)
        self.local_rank = local_rank
        self._processes: dict[int, int] = {}  # local ranks, by descriptors of their processes
        nonce = secrets.token_bytes(self._FAR)
        with ExitStack() as stack:
            file = os.memfd_create("reduction-node")
            stack.callback(os.close, file)
            os.truncate(file, PAGE_BYTES)
            os.pwrite(file, nonce, 0)
            said = gather(json.dumps([os.getpid(), file, nonce.hex()]))
            self._pages = [self._open(stack, at, *json.loads(one)) for at, one in enumerate(said)]
            self._opened = stack.pop_all()

    def _open(self, stack: ExitStack, at: int, pid: int, file: int, nonce: str) -> mmap.mmap:
        try:
            if pid != os.getpid():
                process = os.pidfd_open(pid)
                stack.callback(os.close, process)
                self._processes[process] = at
            with Path(f"/proc/{pid}/fd/{file}").open("r+b") as its:
                page = stack.enter_context(mmap.mmap(its.fileno(), PAGE_BYTES))
            if page[: self._FAR].hex() != nonce:
                raise OSError(f"process {pid} is another one here")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"rank {self.ranks[at]} seems to be on this node, but cannot be reached there "
                f"({error}): set REDUCTION_HIERARCHY=off"
            ) from None
        return page

    def go_on(self, way: int) -> None:
        """Say that this rank has come to what is next on this way."""
        own, place = self._pages[self.local_rank], self._FAR + 8 * way
        own[place : place + 8] = (self._far(own, way) + 1).to_bytes(8, "little")

    def too_late(self, way: int) -> ReductionTimeout:
        """Return what names the ranks that have not come as far as this one."""
        far, here = [self._far(page, way) for page in self._pages], self.local_rank
        late = [rank for rank, its in zip(self.ranks, far, strict=True) if its < far[here]]
        late = late or [rank for rank in self.ranks if rank != self.ranks[here]]
        why = f"of the ranks of this node, {', '.join(map(str, late))} did not take part in time"
        return ReductionTimeout(why, missing=tuple(late))

    def leave(self, reason: ReductionError) -> None:
        """Say why this rank takes part no longer."""
        said, own = encode_error(reason), self._pages[self.local_rank]
        own[self._HEAD.size : self._HEAD.size + len(said)] = said
        own[self._LENGTH : self._HEAD.size] = len(said).to_bytes(4, "little")  # now it can be read

    def check(self) -> None:
        """Raise why another rank takes part no longer, or that it has ended, if one has."""
        watch = select.poll()  # two threads cannot share one
        for process in self._processes:
            watch.register(process, select.POLLIN)
        gone = [self._processes[process] for process, _ in watch.poll(0)]
        for at, page in enumerate(self._pages):
            *_, length = self._HEAD.unpack_from(page)
            if length and at != self.local_rank:
                raise decode_error(page[self._HEAD.size : self._HEAD.size + length])
        if gone:
            rank = self.ranks[min(gone)]
            raise RankLostError(f"rank {rank}, of this node, has ended", rank=rank)

    def close(self) -> None:
        """Leave the node; no thread is in a call here any more."""
        self._processes = {}
        self._opened.close()

    def _far(self, page: mmap.mmap, way: int) -> int:
        return int(self._HEAD.unpack_from(page)[1 + way])


class NodeGroup:
    """What a rank does with the others of its node, until it takes part no longer.

    A call goes two ways, into the node's ranks and out of them, and each way has a process group
    and a thread of its own: a rank may be on the way in with the next call while another one is
    still on its way out, and torch matches what ranks do in a group by its order alone.

    Every method that takes `until`, in seconds of the monotonic clock, raises:
        ReductionTimeout: some ranks have not come by then; it names them.
        ReductionError: why a rank of the node takes part no longer, this one included.
    """

    def __init__(self, pages: NodePages, groups: Sequence[dist.ProcessGroup]) -> None:
        self._pages = pages
        self._groups = groups
        # Of each way, until it has ended well: no thread of Gloo's is to drop the last reference.
        self._latest: list[dist.Work | None] = [None, None]
        self._failures: list[ReductionError] = []  # no lock: a signal handler may come at any time

    @property
    def failure(self) -> ReductionError | None:
        """Why this rank takes part no longer."""
        return self._failures[0] if self._failures else None

    def fail(self, error: ReductionError, told: ReductionError | None = None) -> bool:
        """Take part no longer, and tell the others why; return whether that is new.

        `told` is what they hear, if that is not `error`.
        """
        self._failures.append(error)
        new = self._failures[0] is error
        if new:
            self._pages.leave(told or error)
        return new

    def check_own(self) -> None:
        """Raise why this rank takes part no longer, if it does not."""
        if self.failure is not None:
            raise copy.copy(self.failure)

    def check(self) -> None:
        """Raise why a rank of the node takes part no longer, if one does not."""
        self.check_own()
        self._pages.check()

    def close(self) -> None:
        """Leave the node; no thread is in a call here any more."""
        self._pages.close()
        begun = [work for work in self._latest if work is not None]
        if begun:
            threading.Thread(target=_outlive, args=(begun, self._groups), daemon=True).start()

    def agree(self, way: int, said: Any, until: float) -> list[Any]:
        """Return what all ranks say, in local-rank order; as JSON at most `MESSAGE_BYTES`."""
        message = json.dumps(said).encode().ljust(MESSAGE_BYTES)
        assert len(message) == MESSAGE_BYTES, "the others could not tell where it ends"
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows = torch.empty((len(self._pages.ranks), MESSAGE_BYTES), dtype=torch.uint8)
        self.gather(way, rows, own, until)
        return [json.loads(bytes(row)) for row in rows.numpy()]

    def swap(
        self, way: int, rows: torch.Tensor, data: torch.Tensor, sizes: Sequence[int], until: float
    ) -> None:
        """Give each rank its part of `data`, and get this rank's part of all of them, as `rows`.

        `sizes` are those of the parts, in bytes.
        """
        own = [sizes[self._pages.local_rank]] * len(sizes)
        start = partial(dist.all_to_all_single, rows, data, own, list(sizes))
        self._do(way, start, data.device, until)

    def gather(self, way: int, rows: torch.Tensor, part: torch.Tensor, until: float) -> None:
        """Get the parts of all ranks, of the same size, as `rows`."""
        self._do(way, partial(_ALL_GATHER, rows.view(-1), part), part.device, until)

    def _do(
        self, way: int, start: Callable[..., dist.Work], device: torch.device, until: float
    ) -> None:
        """Wait for the end, or of what is on a GPU let the current stream wait for it."""
        self._pages.go_on(way)
        try:
            work = self._latest[way] = start(group=self._groups[way], async_op=True)
            # Not in a call of Gloo's: `worker_client.communicators.process_group` says why.
            if device.type == "cpu":
                self.wait_for(work.is_completed, way, until)
            work.wait()
            self._latest[way] = None  # it refers to buffers
        except ReductionError:
            raise
        except RuntimeError as error:  # what torch makes of a connection that has ended
            end = time.monotonic() + GONE_S
            while time.monotonic() < end:
                self.check()  # says who is gone, or why one has left
                time.sleep(LONGEST_PAUSE_S)
            ranks, why = self._pages.ranks, str(error).partition("\n")[0]
            raise LocalProtocolError(
                f"a connection among the ranks {ranks} of this node has ended: {why}"
            ) from error

    def wait_for(self, done: Callable[[], bool], way: int, until: float) -> None:
        """Wait until something is done in which all ranks of the node take part."""
        pause_s = SHORTEST_PAUSE_S
        while not done():
            try:
                self.check()
            except ReductionError:
                if self.failure is None:
                    time.sleep(GRACE_S)  # ranks leave when they have all that they need
                if self.failure is not None or not done():
                    raise
            if time.monotonic() > until:
                raise self._pages.too_late(way)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _outlive(begun: Sequence[dist.Work], groups: Sequence[dist.ProcessGroup]) -> None:
    """Keep process groups until what they have begun has ended: letting go of one waits for it."""
    while groups and not all(work.is_completed() for work in begun):
        time.sleep(LONGEST_PAUSE_S * 100)
