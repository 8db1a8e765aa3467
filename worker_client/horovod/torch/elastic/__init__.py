"""``hvd.elastic``: what a PyTorch training whose ranks come and go is made of."""

from __future__ import annotations

from worker_client.horovod.common.elastic import ObjectState, State, run
from worker_client.horovod.common.exceptions import HostsUpdatedInterrupt
from worker_client.horovod.torch.elastic.sampler import ElasticSampler
from worker_client.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
