"""One rank of three whose group is given other members, again and again, by torch's own calls."""

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import worker_client.torch_backend
from reducer.errors import LocalProtocolError
from tests.ranks import write_result

RANK, SIZE = int(os.environ["RANK"]), 3
STORE = dist.TCPStore(
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]),
    is_master=False,
    wait_for_workers=False,
)
reductions = 0


def handles(topic, size=SIZE):
    """Exchange handles with all processes, as a launcher would."""
    STORE.set(f"{topic}/{RANK}", dist._get_reconfigure_handle())
    return [STORE.get(f"{topic}/{rank}").decode() for rank in range(size)]


def become(uuid, members):
    dist._reconfigure(uuid, members, timeout=timedelta(seconds=30)).wait()
    assert dist.get_world_size() == len(members)


def check(size):
    """All-reduce, through reducers if there is anybody else, and let Gloo do its part."""
    global reductions  # noqa: PLW0603 (of this process)
    tensor = torch.full((5,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 5
    sent = torch.full((2,), float(dist.get_rank()))
    dist.broadcast(sent, group_src=size - 1)
    assert sent.tolist() == [size - 1.0] * 2
    client = dist.group.WORLD.client
    if size > 1:
        assert client.world_size == size
        reductions += client.bytes_reduced > 0


def main():
    dist.init_process_group(
        "reduction",
        store=dist.PrefixStore("group", STORE),
        rank=RANK,
        world_size=SIZE,
        timeout=timedelta(seconds=30),
        enable_reconfigure=True,
    )
    assert dist._supports_reconfigure()
    if os.environ.get("NEW"):
        become(60, handles("new"))
        check(SIZE)
        write_result(reductions)
        return
    become(RANK, [dist._get_reconfigure_handle()])  # each alone
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    with pytest.raises(RuntimeError, match="already used"):
        become(RANK, [dist._get_reconfigure_handle()])
    with pytest.raises(LocalProtocolError, match="has no members: reconfigure it"):
        dist.group.WORLD.join()
    become(10, handles("all"))
    assert dist.get_rank() == RANK
    check(SIZE)
    become(20, set(handles("in any order")))
    check(SIZE)
    dist.group.WORLD.abort()
    become(30, handles("after an abort"))
    check(SIZE)
    first, last = handles("apart")[:1], handles("apart")[1:]
    become(40 + (RANK > 0), last if RANK else first)
    check(len(last) if RANK else 1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()  # rank 2 is killed here
    left = handles("left", 2)
    become(50, left)
    check(2)
    become(60, handles("new"))
    check(SIZE)
    write_result(reductions)


assert worker_client.torch_backend
main()
