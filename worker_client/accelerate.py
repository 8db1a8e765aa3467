"""Accelerate, and so transformers' Trainer: one line before the model is prepared.

Accelerate wraps models in DDP itself, with the arguments and the communication hook that its
`ddp_handler` gives. Its own handler knows a closed list of hooks, and it takes no handlers of other
classes as arguments; but whatever is found in that attribute is asked.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import worker_client
from reducer.errors import ConfigError
from worker_client import ddp

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.client.client import Client

_DDP_TYPES = ("MULTI_CPU", "MULTI_GPU")  # names in accelerate.DistributedType
_REDUCED = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


class ReductionHandler:
    """What Accelerate asks for DDP's arguments and hook.

    Args:
        client: the one to use.
        given: Accelerate's own handler, if the user passed one: its arguments stay in force.
        wrapper: applied to the hook, if not None.
    """

    def __init__(self, client: Client, given: Any, wrapper: Callable[[Any], Any] | None) -> None:
        self._client = client
        self._given = given
        self._wrapper = wrapper
        self._attached: list[weakref.ref[DistributedDataParallel]] = []  # in the order of prepare()

    def to_kwargs(self) -> dict[str, Any]:
        """Return DDP's arguments: the user's, and large buckets unless they chose a size.

        Accelerate's handler does not tell its default of 25 MB from a user's 25.
        """
        given = {} if self._given is None else self._given.to_kwargs()
        return {"bucket_cap_mb": ddp.DEFAULT_BUCKET_CAP_MB, **given}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attach to a model that Accelerate has wrapped.

        Raises:
            ConfigError: as `worker_client.attach`.
        """
        ddp.attach(model, self._client, wrapper=self._wrapper)
        self._attached.append(weakref.ref(model))

    def save_residuals(self, folder: str) -> None:
        """Write what error feedback keeps at this rank, if it does; for ``save_state()``."""
        kept = [state.state_dict() for state in self._states()]
        path = self._residuals(folder)
        if any(state["residuals"] for state in kept):
            torch.save(kept, path)
        else:
            path.unlink(missing_ok=True)  # of an earlier checkpoint in this folder

    def load_residuals(self, folder: str) -> None:
        """Read what `save_residuals` wrote at this rank, if it did; for ``load_state()``.

        Raises:
            ConfigError: they are of other models.
        """
        path, states = self._residuals(folder), self._states()
        if not path.exists():  # it was written before there were any
            for state in states:
                state.load_state_dict({"residuals": {}})
            return
        kept = torch.load(path, weights_only=True)
        if len(kept) != len(states):
            raise ConfigError(
                f"{path} has the residuals of {len(kept)} models, and {len(states)} are prepared: "
                "prepare() the same models before load_state()"
            )
        for state, residuals in zip(states, kept, strict=True):
            state.load_state_dict(residuals)

    def _states(self) -> list[ddp.ReductionState]:
        # Accelerate's own list has what models were before it wrapped them.
        attached = (reference() for reference in self._attached)
        return [ddp.state_of(model) for model in attached if model is not None]

    def _residuals(self, folder: str) -> Path:
        return Path(folder, f"reduction_{self._client.rank}.pt")


def attach(accelerator: Any, client: Client | None = None) -> Client:
    """Let reducers average the gradients of all models that `accelerator` will prepare.

    ``accelerator.reduce()`` of a floating tensor goes through them, too, so that Accelerate's
    `LocalSGD` averages weights there. With error feedback ``accelerator.save_state()`` writes each
    rank's residuals into a file of its own, ``reduction_RANK.pt``, which ``load_state()`` reads.

    Args:
        accelerator: an `accelerate.Accelerator` before its `prepare()`; that of a transformers
            `Trainer` is ``trainer.accelerator``, before its `train()`.
        client: the one to use; `worker_client.init()`'s by default.

    Returns:
        The client in use.

    Raises:
        ConfigError: there is no DDP to attach to, or it has another hook; the message says what to
            change.
        ReductionError: as `worker_client.init`.
    """
    if not hasattr(accelerator, "ddp_handler"):
        raise ConfigError(
            f"attach() takes an Accelerator, got {type(accelerator).__name__}: a transformers "
            "Trainer has one in trainer.accelerator"
        )
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "NO":
        raise ConfigError(
            "this is the only process, so there is nothing to average: start the script with "
            "torchrun or `accelerate launch`"
        )
    if kind not in _DDP_TYPES:
        raise ConfigError(
            f"Accelerate wraps models for {kind} here, reducers serve DDP "
            f"({' and '.join(_DDP_TYPES)}): leave out the other plugin"
        )
    if _has_wrapped(getattr(accelerator, "_models", [])):
        raise ConfigError(
            "the accelerator has wrapped a model already: call attach() before prepare(), or "
            "worker_client.attach(model) with what prepare() returned"
        )
    given = accelerator.ddp_handler
    if isinstance(given, ReductionHandler):
        raise ConfigError("attach() was called before with this accelerator: call it once")
    if client is None and dist.get_backend() == "reduction":
        raise ConfigError(
            "the process group's backend is 'reduction', through which reducers average all that "
            "Accelerate does already: leave out attach(), or the init_process_group() before"
        )
    wrapper = _wrapper(given)
    used = worker_client.init() if client is None else client
    accelerator.ddp_handler = handler = ReductionHandler(used, given, wrapper)
    accelerator.reduce = partial(_reduce, used, accelerator.reduce)
    accelerator.register_save_state_pre_hook(lambda _, __, folder: handler.save_residuals(folder))
    accelerator.register_load_state_pre_hook(lambda _, folder: handler.load_residuals(folder))
    return used


def _has_wrapped(models: list[torch.nn.Module]) -> bool:
    """Whether one of the models is in DDP, as none is that was prepared for evaluation alone.

    Accelerate's list has what models were before it wrapped them, and DDP leaves no mark on those.
    """
    found = (one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel))
    return bool(models) and any(getattr(one, "module", None) in models for one in found)


def _reduce(
    client: Client,
    theirs: Callable[[Any, str, float], Any],
    tensor: Any,
    reduction: str = "sum",
    scale: float = 1.0,
) -> Any:
    """Stand in for `Accelerator.reduce`, which does what reducers are not asked for.

    Args:
        client: makes the all-reduces.
        theirs: Accelerate's own.
        tensor: to reduce, or lists and dicts of tensors.
        reduction: ``"sum"`` or ``"mean"``, or another one that Accelerate knows.
        scale: of use on TPUs only.
    """
    floating = isinstance(tensor, torch.Tensor) and tensor.dtype in _REDUCED
    if not floating or reduction not in {"sum", "mean"}:
        return theirs(tensor, reduction, scale)
    reduced = tensor.detach().clone()
    client.all_reduce(reduced, reduction, exact=True).wait()  # weights, or what a user measures
    return reduced


def _wrapper(given: Any) -> Callable[[Any], Any] | None:
    """Return what compresses gradients, if the user's handler asks for it.

    Raises:
        ConfigError: it asks for a hook of its own.
    """
    if given is None:
        return None
    hook, wrapper = _name(given, "comm_hook"), _name(given, "comm_wrapper")
    if hook != "no":
        raise ConfigError(
            f"comm_hook={hook} is another communication hook, and DDP takes one: leave it out; "
            "comm_wrapper=FP16 or BF16 makes gradients smaller"
        )
    if wrapper == "no":
        return None
    found: Callable[[Any], Any] = getattr(default_hooks, f"{wrapper}_compress_wrapper")
    return found


def _name(given: Any, field: str) -> str:
    value = getattr(given, field, "no")
    return str(getattr(value, "value", value))
