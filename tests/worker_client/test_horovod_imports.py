"""The command of docs/horovod.md changes a script's imports, and every name is where it was."""

import inspect
import re
import runpy

import pytest

from tests.horovod_imports import changed

pytest.importorskip("torch", reason="needs torch")

import worker_client.horovod as hvd

SCRIPT = '''
"""A script for Horovod."""
import horovod
import horovod.torch as hvd
import horovod.torch
import horovod.torch.elastic
from horovod.torch import elastic, rank
from horovod.common.elastic import ObjectState, State
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet, add_process_set, remove_process_set
from horovod.common.util import gloo_built, mpi_built, nccl_built
from horovod.torch.compression import Compression
from horovod.torch.elastic import ElasticSampler, TorchState, run
from horovod.torch.elastic.sampler import ElasticSampler as OfItsModule
from horovod.torch.elastic.state import TorchState as OfItsOwnModule
from horovod.torch.functions import allgather_object, broadcast_object
from horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import allreduce, global_process_set, init, size, synchronize
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
if True:
    import horovod
from horovod import __version__

version = horovod.__version__
assert version == __version__
same = [
    (hvd, horovod.torch),
    (hvd.allreduce, allreduce),
    (hvd.broadcast_parameters, broadcast_parameters),
    (hvd.elastic.TorchState, OfItsOwnModule),
    (hvd.elastic.ElasticSampler, OfItsModule),
    (hvd.elastic.State, State),
    (hvd.rank, rank),
    (hvd.global_process_set, global_process_set),
    (hvd.HorovodInternalError, HorovodInternalError),
    (hvd.DistributedOptimizer, DistributedOptimizer),
]
built = gloo_built() or mpi_built(verbose=True) or hvd.nccl_built()
'''


def test_one_command_changes_every_import(tmp_path):
    script = changed(SCRIPT, tmp_path)
    assert not re.search(r"(import|from) horovod\b", script)
    assert changed(script, tmp_path) == script, "a second time nothing is to be changed"
    found = runpy.run_path(str(tmp_path / "train.py"))
    assert all(one is other for one, other in found["same"])
    assert found["built"] is False
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["version"])


def test_forms_of_a_call_have_its_arguments():
    def arguments(name):
        return list(inspect.signature(getattr(hvd, name)).parameters)

    rest = [name for name in arguments("allreduce")[1:] if name != "compression"]
    for form in ("allreduce_", "allreduce_async", "allreduce_async_"):
        assert arguments(form) == ["tensor", *rest]
        assert arguments(f"grouped_{form}") == ["tensors", *rest]
    for form in ("broadcast_", "broadcast_async", "broadcast_async_"):
        assert arguments(form) == arguments("broadcast")
