"""Tensors on a device that staging knows nothing of, at rank 0, beside rank 1's in host memory.

Started by test_other_devices, with a type of torch's devices as its argument: ``lazy``, which
every machine has; or ``private``, torch's `PrivateUse1`, which can do nothing here but copy whole
tensors.
"""

import importlib
import logging
import os
import sys

import numpy as np
import pytest
import torch
from torch._C._acc import create_empty_tensor

import worker_client
from reducer.errors import ConfigError, DeviceError, MismatchError
from tests.integration.cases import run_cases
from tests.worker_client.slow_device import DTYPES, VIEWS
from worker_client import horovod as hvd
from worker_client.client.bootstrap import connect
from worker_client.collectives import broadcast

KIND = sys.argv[1]
MINE = int(os.environ["RANK"]) == 0
PLACE = KIND if MINE else "cpu"
said = []


def begin():
    """Let torch have the device."""
    if KIND == "lazy":
        importlib.import_module("torch._lazy.ts_backend").init()
    else:
        setup = importlib.import_module("torch.utils.backend_registration")
        setup._setup_privateuseone_for_python_backend(KIND)  # noqa: SLF001 (there is no other)
        for kernel in (empty_strided, _copy_from, detach):
            torch.library.impl(f"aten::{kernel.__name__}", "PrivateUse1")(kernel)


def shell(hidden):
    """Return a tensor whose elements are elsewhere."""
    made = create_empty_tensor(hidden.shape, hidden.dtype)
    made.hidden = hidden
    return made


def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    del stride, layout, device, pin_memory
    return shell(torch.empty(size, dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    del non_blocking
    from_, to = (getattr(one, "hidden", one) for one in (source, target))
    to.copy_(from_)
    return target


def detach(one):
    return shell(one.hidden)


def client():
    return worker_client.init()


def reduced(tensor, op="sum", **arguments):
    """Reduce a tensor from where this rank has it, and return it from there."""
    there = tensor.clone().to(PLACE)
    assert there.device.type == PLACE
    assert client().all_reduce(there, op, **arguments).wait(20) is there
    return there.cpu()


def of_both(make):
    """Return what both ranks give, in order."""
    return [make(torch.Generator().manual_seed(rank)) for rank in range(2)]


def mine(both):
    return both[client().rank]


def case_dtypes():
    for dtype in DTYPES:
        both = of_both(
            lambda chance, to=dtype: torch.randint(0, 50, (3000,), generator=chance).to(to)
        )
        assert torch.equal(reduced(mine(both)), both[0] + both[1]), dtype


def case_sizes():
    for shape in ((0,), (), (1,), (30, 40), (3_000_000,)):  # the last one is some pieces of CUDA's
        both = of_both(lambda chance, of=shape: torch.randn(of, generator=chance))
        assert torch.equal(reduced(mine(both)), both[0] + both[1]), shape


def case_views_and_nothing_beside_them():
    if KIND == "private":
        return  # it has none
    for name, view in VIEWS.items():
        both = of_both(lambda chance: torch.randn(80, 100, generator=chance))
        whole = mine(both).clone().to(PLACE)
        client().all_reduce(view(whole), "sum").wait(20)
        expected = mine(both).clone()
        view(expected).copy_(view(both[0]) + view(both[1]))
        assert torch.equal(whole.cpu(), expected), name


def case_the_bits_are_those_of_host_memory():
    for wire in ("bf16", "int8"):
        with connect(job=f"rounded to {wire}", wire_dtype=wire) as one:
            given, ends = mine(of_both(lambda chance: torch.randn(30_000, generator=chance))), []
            for place in ("cpu", PLACE):
                kept, there = np.zeros(30_000, np.float32), given.clone().to(place)
                one.all_reduce(there, residual=kept).wait(20)
                ends.append((there.cpu().numpy().tobytes(), kept.tobytes()))
        assert ends[0] == ends[1]
        assert any(ends[0][1])  # something was rounded


def case_weights_names_and_broadcasts():
    rank = float(client().rank)
    assert (reduced(torch.full((5000,), rank), "mean", weight=1 + 2 * rank) == 0.75).all()
    assert (reduced(torch.full((30, 40), rank), "max", name="x") == 1).all()
    for root in range(2):
        there = torch.full((50, 60), rank).to(PLACE)
        broadcast(client(), there, root)
        assert (there.cpu() == root).all()


def case_horovods_interface():
    hvd.init()
    rank = hvd.rank()
    there = torch.full((300,), float(rank)).to(PLACE)
    hvd.broadcast_(there, 1, name="weights")
    assert (there.cpu() == 1).all()
    there = torch.full((300,), float(rank)).to(PLACE)
    hvd.allreduce_(there, op=hvd.Average, name="gradients")
    assert (there.cpu() == 0.5).all()


def case_it_was_said_once_what_it_costs():
    about = [line for line in said if "overlap" in line]
    assert [line.partition(" are copied")[0] for line in about] == [f"tensors on {KIND}"] * MINE


def case_what_is_refused_is_refused_at_both():
    refused = [(torch.ones(3, dtype=torch.bool), "bool cannot be reduced")]
    refused += [(torch.ones(3, device="meta"), "no elements")]
    for tensor, why in refused:
        if MINE:
            with pytest.raises(ConfigError, match=why):
                client().all_reduce(tensor if tensor.is_meta else tensor.to(KIND))
        else:
            with pytest.raises(MismatchError, match=why):
                client().all_reduce(torch.ones(3)).wait(20)
    assert (reduced(torch.ones(3)) == 2).all()


def case_errors_of_the_device_are_typed():
    def fail(*_):
        raise RuntimeError("an illegal memory access")

    with connect(job=f"alone {MINE}", rank=0, world_size=1) as alone:
        there, then = torch.ones(3).to(PLACE), torch.ones(3).to(PLACE)
        with pytest.MonkeyPatch.context() as broken:
            if MINE:
                broken.setattr(torch.Tensor, "copy_", fail)
                with pytest.raises(DeviceError, match=f"{KIND}:0 failed: an illegal") as caught:
                    alone.all_reduce(there, "sum").wait(20)
                assert caught.value.device == f"{KIND}:0"
                broken.setattr(torch.Tensor, "cpu", fail)
                with pytest.raises(DeviceError, match="an illegal memory access"):
                    alone.all_reduce(there, "sum")
        alone.all_reduce(then, "sum").wait(20)


if __name__ == "__main__":
    hears = logging.Handler()
    hears.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("worker_client").addHandler(hears)
    begin()
    run_cases(globals())
