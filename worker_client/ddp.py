"""PyTorch DistributedDataParallel: gradients are averaged by the reducers.

A hook must not raise (DDP would be unusable afterwards) and must not wait (the backward pass would
stop overlapping with the network). So the hook starts an all-reduce and returns its future; a
failure completes the future all the same, and is raised by `loss.backward()` once DDP has finished
its own work, which leaves the model fit for the next step.

Autograd runs what is queued at the end of each backward pass, and passes may be nested: reentrant
checkpointing runs one per segment. An error waits for the end of the outermost pass, or of the
nested one that brings DDP's last bucket, from which it gets out to the outermost.
"""

# No `from __future__ import annotations`: DDP inspects the hook's annotations as objects.
import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch._C._distributed_c10d import GradBucket  # what torch.distributed.GradBucket is
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import worker_client
from reducer.errors import ConfigError, DeviceError, ReductionError
from reducer.wire.constants import ReduceOp
from worker_client._packing import Pack
from worker_client.collectives import broadcast_bytes_from_any
from worker_client.staging.weighted import check_weight
from worker_client.staging.wire_rule import ALONE_BYTES, SMALLEST_BYTES, WIRE_DTYPES

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterable

    from worker_client.client.client import Client

    Exclude = Callable[[str, torch.nn.Parameter], bool]

DEFAULT_BUCKET_CAP_MB = 64  # for DDP's bucket_cap_mb: large buckets keep the network busy

_OUTSIDE_BACKWARD = -1

log = logging.getLogger(__name__)


class _HookCall(NamedTuple):
    """An all-reduce of a part of a bucket.

    Attributes:
        data: the part, or a copy; reduced in place.
        exact: whether it travels as it is.
        residual: as of `Client.all_reduce`.
        finish: called when it has ended well.
    """

    data: torch.Tensor
    exact: bool = False
    residual: torch.Tensor | None = None
    finish: Optional["Callable[[], object]"] = None


class ReductionState:
    """What `reduction_hook` needs between calls; `state_of` returns that of an attached model.

    With a wire dtype each gradient travels as it would alone, however DDP fills its buckets: one of
    16 KiB and more is rounded, and the smaller ones of a bucket share a call in which they stay
    exact. Those below 256 KiB share a call, too, in which none is in a block with another.

    Args:
        client: the one to use; `worker_client.init()`'s by default.
        weight: of this rank's gradients in their mean; see the property.
        error_feedback: keep, for each parameter, what the cast to the wire's type takes away from
            its gradient, and add it to the next step's: two further float32 tensors for each, in
            host memory; the second lets a backward pass that fails leave what it began with. By
            default that is done for gradients that travel in 8 bits. Rounding of the mean, at the
            reducers, takes nothing away on average.
        named_parameters: the model's, as its `named_parameters()` gives them. `exclude` and
            `state_dict` need them.
        exclude: called once with each name and parameter; returns whether its gradients stay exact
            whatever their size, the same at every rank.

    Raises:
        ConfigError: `error_feedback` without a wire dtype, `exclude` without named_parameters, or
            `weight` is none.
    """

    __slots__ = (
        "_before",
        "_begun",
        "_changed",
        "_client",
        "_complete",
        "_error",
        "_excluded",
        "_names",
        "_residuals",
        "_task",
        "_weight",
        "error_feedback",
    )

    def __init__(
        self,
        client: Optional["Client"] = None,
        *,
        weight: float | None = None,
        error_feedback: bool | None = None,
        named_parameters: Optional["Iterable[tuple[str, torch.nn.Parameter]]"] = None,
        exclude: Optional["Exclude"] = None,
    ) -> None:
        self._client: Client | None = worker_client.init() if client is None else client
        if error_feedback and self.client.wire_dtype == "none":
            raise ConfigError(
                "error_feedback=True keeps what the cast takes away, and nothing is cast: set "
                "REDUCTION_WIRE_DTYPE=bf16, or leave it out"
            )
        if exclude is not None and named_parameters is None:
            raise ConfigError(f"exclude= is asked of names: {_NAMED}")
        self.error_feedback = error_feedback
        self.weight = weight
        self._begin()
        for name, parameter in named_parameters or ():
            self._names[parameter] = name
            if exclude is not None and exclude(name, parameter):
                self._excluded.add(parameter)

    def _begin(self) -> None:
        self._names: dict[torch.Tensor, str] = {}  # of parameters
        self._excluded: set[torch.Tensor] = set()
        # By parameter, and in its memory format, as its gradient is in a bucket.
        self._residuals: dict[torch.Tensor, torch.Tensor] = {}
        self._before: dict[torch.Tensor, torch.Tensor] = {}  # what they were before the last call
        # Of DDP's buckets since an error was last raised, or there was none to raise:
        self._changed: set[torch.Tensor] = set()  # parameters whose residuals they have changed
        self._begun: list[torch.futures.Future[torch.Tensor]] = []
        self._error: ReductionError | None = None
        self._complete = False  # whether the last bucket has begun
        self._task = _OUTSIDE_BACKWARD  # the backward pass that was last prepared to raise

    # DDP keeps its hook's state among its own attributes, so a model's copies (`AveragedModel`
    # makes one) and files (`torch.save`) hold it, too. A copy shares the client, and a file has
    # none.

    def __copy__(self) -> "ReductionState":
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__())
        copied._client = self._client  # noqa: SLF001 (of this class)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReductionState":
        del memo
        return self.__copy__()

    def __getstate__(self) -> tuple[float | None, bool | None]:
        return self._weight, self.error_feedback

    def __setstate__(self, state: tuple[float | None, bool | None]) -> None:
        self._client = None
        self._weight, self.error_feedback = state
        self._begin()

    @property
    def client(self) -> "Client":
        """The client in use; `worker_client.init()`'s in a state that was loaded from a file."""
        if self._client is None:
            self._client = worker_client.init()
        return self._client

    @property
    def weight(self) -> float | None:
        """Weight of this rank's gradients in their mean, such as the samples in its batch.

        Set it at every rank before each backward pass whose batches are unequal; None everywhere is
        the plain mean. A rank that has joined early (`Join`) counts with weight 0, so 1 everywhere
        is what DDP does without a hook in ``join(divide_by_initial_world_size=False)``.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if weight is not None:
            check_weight(weight)
        self._weight = weight

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this rank: its residuals, by parameters' names.

        Each rank has its own, and loads its own. As those of torch's modules, they are the tensors
        that the next backward pass changes. A training that goes on from a checkpoint with them
        ends with the bits of one that was not interrupted.

        Raises:
            ConfigError: a parameter's name is not known.
        """
        if unnamed := sum(parameter not in self._names for parameter in self._residuals):
            raise ConfigError(f"{unnamed} parameters with residuals have no name: {_NAMED}")
        return {"residuals": {self._names[p]: kept for p, kept in self._residuals.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a checkpoint's residuals, which are copied; those of before are dropped.

        Args:
            state_dict: what `state_dict` has returned at this rank.

        Raises:
            ConfigError: it is of another model.
        """
        residuals = state_dict["residuals"]
        parameters = {name: parameter for parameter, name in self._names.items()}
        if unknown := sorted(set(residuals) - set(parameters)):
            raise ConfigError(
                f"residuals of {unknown[0]!r}, which is no parameter here: load them into the "
                f"model that they are of. {_NAMED}"
            )
        loaded = {}
        for name, kept in residuals.items():
            loaded[parameters[name]] = own = _like(parameters[name])
            if kept.shape != own.shape:
                raise ConfigError(
                    f"residuals of {name!r} have the shape {tuple(kept.shape)}, the parameter has "
                    f"{tuple(own.shape)}: load them into the model that they are of"
                )
            own.copy_(kept)
        self._residuals = loaded
        self._changed.clear()

    def calls(self, bucket: GradBucket) -> list[_HookCall]:
        """Return the all-reduces that a bucket makes, the same at every rank."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if buffer.layout is not torch.strided or not self.client.rounds(buffer):
            return [_HookCall(buffer, exact=True)]
        gradients = buffer.split_with_sizes([_real(one).numel() for one in parameters])
        exact: list[torch.Tensor] = []
        rounded: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        alone: list[_HookCall] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            stays = gradient.nbytes < SMALLEST_BYTES or parameter in self._excluded
            residual = None if stays else self._residual(parameter)
            if gradient.nbytes >= ALONE_BYTES:
                alone.append(_HookCall(gradient, exact=stays, residual=residual))
            elif stays:
                exact.append(gradient)
            else:
                rounded.append((gradient, residual))
        if not rounded and all(call.exact for call in alone):
            return [_HookCall(buffer, exact=True)]
        calls = []
        if exact:
            pack = Pack(exact)
            calls.append(_HookCall(pack.buffer, exact=True, finish=pack.unpack))
        if len(rounded) == 1:
            ((gradient, residual),) = rounded
            calls.append(_HookCall(gradient, residual=residual))
        elif rounded:
            calls.append(self._together(rounded))
        return calls + alone

    def _together(self, rounded: list[tuple[torch.Tensor, torch.Tensor | None]]) -> _HookCall:
        """Return one all-reduce of gradients that are rounded, each in blocks of its own."""
        wire = WIRE_DTYPES[self.client.wire_dtype]
        assert wire is not None, "or nothing is rounded"
        pack = Pack([gradient for gradient, _ in rounded], wire.values)
        residuals = [residual for _, residual in rounded if residual is not None]
        if not residuals:
            return _HookCall(pack.buffer, finish=pack.unpack)
        kept = Pack(residuals, wire.values)

        def finish() -> None:
            pack.unpack()
            kept.unpack()

        return _HookCall(pack.buffer, residual=kept.buffer, finish=finish)

    def _residual(self, parameter: torch.Tensor) -> torch.Tensor | None:
        feedback = self.error_feedback
        if feedback is None:
            wire = WIRE_DTYPES[self.client.wire_dtype]
            feedback = wire is not None and wire.is_block
        if not feedback:
            return None
        if parameter not in self._residuals:
            self._residuals[parameter] = _like(parameter)
        residual = self._residuals[parameter]
        if parameter not in self._before:
            self._before[parameter] = _like(parameter)
        self._before[parameter].copy_(residual)
        self._changed.add(parameter)
        return residual.as_strided((residual.numel(),), (1,))

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a bucket over all ranks, in place, and return a future of its tensor."""
        in_backward = self._prepare_to_raise(last=bucket.is_last())
        buffer, calls = bucket.buffer(), self.calls(bucket)
        # A thread that waits for a future that knows the device has its stream wait for the result.
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if buffer.device.type == "cpu" else [buffer.device]
        )
        if in_backward:
            self._begun.append(future)

        def finish(error: BaseException | None) -> None:
            if error is None:
                future.set_result(buffer)
            elif in_backward and not isinstance(error, DeviceError):
                self._error = self._error or _as_reduction_error(error)
                future.set_result(buffer)
            else:
                # A rank that has joined early waits for the future itself. And of a device that has
                # failed there is no stream that a result could be ordered on.
                future.set_exception(error)  # type: ignore[arg-type]

        weight = 0.0 if self._weight is not None and not in_backward else self._weight
        end = _LastOf(calls, finish)
        for call in calls:  # also after one that was refused: all ranks make the same calls
            try:
                work = self.client.all_reduce(
                    call.data,
                    ReduceOp.MEAN,
                    weight=weight,
                    residual=call.residual,
                    exact=call.exact,
                )
            except ReductionError as error:
                end(error)
            else:
                work.future().add_done_callback(end.of_work)
        return future

    def _prepare_to_raise(self, *, last: bool) -> bool:
        """See to it that a backward pass ends with the error, if there will be one.

        Args:
            last: whether this is DDP's last bucket.

        Returns:
            Whether there is a backward pass; `Join` calls the hook without one.
        """
        task = torch._C._current_graph_task_id()  # noqa: SLF001 (no public name)
        if task == _OUTSIDE_BACKWARD:
            return False
        if task != self._task:
            if self._complete:  # another model's error, raised before, has ended that pass
                self._settle()
            self._task = task
            # DDP queues its own last step later than this, and a callback that a callback queues
            # runs after that: DDP has waited for every bucket when the error is raised.
            _queue_callback(lambda: _queue_callback(self._raise))
        self._complete |= last
        return True

    def _raise(self) -> None:
        # Autograd has ended the pass, and not the node that a nested pass was begun by.
        nested = torch._C._current_autograd_node() is not None  # noqa: SLF001 (no public name)
        if nested and not self._complete:
            return  # an error would keep the outer pass from bringing DDP's other buckets
        error = self._settle()
        if error is not None:
            raise error

    def _settle(self) -> ReductionError | None:
        """Return the error of DDP's buckets, which then have left the residuals as they were.

        A pass that DDP could not end, as a device or a nested pass failed, has perhaps not waited
        for all of them: their calls change the residuals still, and these stay as they are.
        """
        error, self._error = self._error, None
        begun, self._begun = self._begun, []
        if error is not None and all(future.done() for future in begun):
            for parameter in self._changed:
                self._residuals[parameter].copy_(self._before[parameter])
        self._changed.clear()
        self._complete = False
        return error


class _LastOf:
    """Calls `finish` when the last of a bucket's calls has ended, with the first error or None."""

    def __init__(
        self, calls: list[_HookCall], finish: "Callable[[BaseException | None], None]"
    ) -> None:
        self._calls = calls
        self._finish = finish
        self._lock = threading.Lock()
        self._left = len(calls)
        self._error: BaseException | None = None

    def of_work(self, done: "concurrent.futures.Future[Any]") -> None:
        self(done.exception())

    def __call__(self, error: BaseException | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        if self._error is None:
            for call in self._calls:
                if call.finish is not None:
                    call.finish()
        self._finish(self._error)


def _real(parameter: torch.Tensor) -> torch.Tensor:
    # DDP's buckets hold two numbers for a complex one.
    tensor = parameter.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _like(parameter: torch.Tensor) -> torch.Tensor:
    # Gradients are cast in host memory.
    return torch.zeros_like(_real(parameter), dtype=torch.float32, device="cpu")


def reduction_hook(state: ReductionState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: average a bucket over all ranks through the reducers.

    Args:
        state: made once per model.
        bucket: DDP's flat gradient tensor, reduced in place.

    Returns:
        A future of the bucket's tensor.
    """
    if isinstance(bucket, tuple):
        raise ConfigError(_PYTHON_REDUCER)
    if not torch._C._autograd._profiler_enabled():  # noqa: SLF001 (no public name)
        return state.reduce(bucket)
    with record_function(f"reduction: bucket {bucket.index()}") as shown:
        future = state.reduce(bucket)
        # The range lasts until the result is there.
        shown_until: torch.futures.Future[torch.Tensor]
        shown_until = shown._call_end_callbacks_on_future(future)  # noqa: SLF001 (as torch's own)
        return shown_until


def attach(
    ddp_model: DistributedDataParallel,
    client: Optional["Client"] = None,
    *,
    exclude: Optional["Exclude"] = None,
    wrapper: Optional["Callable[[Any], Any]"] = None,
) -> "Client":
    """Register `reduction_hook` with a DDP model; `worker_client.attach` describes it.

    Args:
        ddp_model: as there.
        client: as there.
        exclude: as there.
        wrapper: applied to the hook, such as PyTorch's `fp16_compress_wrapper`.
    """
    model = getattr(ddp_model, "_orig_mod", ddp_model)  # torch.compile(DDP(...))
    _check(model)
    named = model.module.named_parameters()
    state = ReductionState(client, named_parameters=named, exclude=exclude)
    group = model.process_group
    mine, theirs = (state.client.rank, state.client.world_size), (group.rank(), group.size())
    # Process groups cannot grow: where ranks may join, each has a group of its own.
    spec = state.client.spec
    grows = spec.elastic and not spec.hosts and theirs == (0, 1)
    if mine != theirs and not grows:
        raise ConfigError(
            f"the model's process group has this process as rank {theirs[0]} of {theirs[1]}, the "
            f"client as rank {mine[0]} of {mine[1]}: both must have the same members"
        )
    if grows and not model.find_unused_parameters:
        raise ConfigError(_REARRANGED)
    if spec.elastic and not grows:
        state.client.refuse_newcomers(_SHARED_GROUP)
    hook = reduction_hook
    if wrapper is not None:
        hook = wrapper(reduction_hook)
        # By its own name torch takes bf16's for NCCL's and refuses it without.
        hook.__name__ = f"wrapped_{reduction_hook.__name__}"
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:  # torch's own answer to a second (built-in) hook
        raise ConfigError(f"{_SECOND_HOOK} ({error})") from None
    if model.modules_buffers and model.broadcast_buffers and not grows:
        # What DDP calls before a forward pass, and `Join` for a rank that has joined early. It has
        # no public name.
        sync = BufferSync(model, state)
        model._sync_module_buffers = sync  # type: ignore[method-assign]  # noqa: SLF001
    if state.client.rank == 0:  # once a job: all ranks wrap alike
        _advise(model)
    return state.client


class BufferSync:
    """Gives every rank the buffers of one, such as the running means of BatchNorm, by the client.

    Over the process group, ranks would wait there for a late one: all gradients would then come at
    the same time, and reducers could not tell who is late. Buffers on a device stay with the
    process group, where the host need not wait for them.

    Args:
        model: attached.
        state: of its hook.
    """

    def __init__(self, model: DistributedDataParallel, state: ReductionState) -> None:
        self._model, self._state = model, state
        # Dynamo would trace it as a part of the forward pass, and cannot.
        self._untraced = torch.compiler.disable(self._sync)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[type["BufferSync"], tuple[object, ...]]:
        return type(self), (self._model, self._state)

    def __call__(self, authoritative_rank: int) -> None:
        """Replace all buffers by those of a rank, or of the first one if the job has lost that.

        Raises:
            ReductionError: as `Client.all_reduce`.
        """
        self._untraced(authoritative_rank)

    def _sync(self, authoritative_rank: int) -> None:
        model, client = self._model, self._state.client
        buffers = model.modules_buffers
        hooked = hasattr(model, "buffer_hook")  # the user's own, which DDP's own method calls
        on_device = any(buffer.device.type != "cpu" for buffer in buffers)
        if hooked or on_device or not client.usable:
            theirs = type(model)._sync_module_buffers  # noqa: SLF001 (what this stands for)
            theirs(model, authoritative_rank)  # type: ignore[no-untyped-call]
            return
        present = client.present
        root = authoritative_rank if authoritative_rank in present else present[0]
        with torch.no_grad():
            whole = [buffer.contiguous() for buffer in buffers]
            pack = Pack([each.view(-1).view(torch.uint8) for each in whole])
            what = f"the model's {len(whole)} buffers"
            found, root = broadcast_bytes_from_any(client, pack.buffer.numpy(), root, what)
            if client.rank == root:
                return
            pack.buffer.copy_(torch.from_numpy(found))
            pack.unpack()
            for buffer, each in zip(buffers, whole, strict=True):
                if each is not buffer:  # a copy of one whose elements are apart
                    buffer.copy_(each)


def state_of(ddp_model: DistributedDataParallel) -> ReductionState:
    """Return the state of an attached model's hook: its weight, and what a checkpoint must hold.

    Raises:
        ConfigError: the model is not attached.
    """
    for state in states_of([ddp_model]):
        return state
    raise ConfigError("the model has no reduction_hook: call worker_client.attach(model) first")


def states_of(models: "Iterable[Any]") -> list[ReductionState]:
    """Return the states of the hooks of those models that are attached, in order."""
    originals = [getattr(model, "_orig_mod", model) for model in models]
    hooks = [hook for model in originals for hook in getattr(model, "_comm_hooks", ())]
    return [state for _, state in hooks if isinstance(state, ReductionState)]


_NAMED = (
    "make the state with ReductionState(named_parameters=model.named_parameters()), or by "
    "worker_client.attach(model)"
)
_SECOND_HOOK = (
    "the model already has a communication hook, and DDP takes one: remove the other "
    "attach() or register_comm_hook() call, or pass it our hook, such as "
    "fp16_compress_wrapper(reduction_hook)"
)
_REARRANGED = (
    "a model whose process group has this rank alone belongs to a job that ranks may join: wrap it "
    "with DistributedDataParallel(module, find_unused_parameters=True). Otherwise DDP rearranges "
    "its buckets after the first step, and a rank that joins later has others than the rest"
)
_SHARED_GROUP = (
    "no rank can join: a DDP model is attached whose process group has several ranks, and buckets "
    "that a newcomer's would not be like. Give each rank a process group of its own, as "
    "examples/elastic_digits.py does"
)
_PYTHON_REDUCER = (
    "torch._dynamo's optimize_ddp='python_reducer' gives hooks no buckets: leave "
    "torch._dynamo.config.optimize_ddp at its default"
)


def _check(model: Any) -> None:
    """Refuse what a communication hook cannot serve.

    Raises:
        ConfigError: the message says what to change.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"attach() takes a model wrapped in DistributedDataParallel, got "
            f"{type(model).__name__}: call attach(DistributedDataParallel(model))"
        )
    if model.mixed_precision is not None:
        raise ConfigError(
            "DDP's mixed_precision= registers a communication hook of its own: use torch.autocast, "
            "or fp16_compress_wrapper(reduction_hook) for smaller gradients"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(_PYTHON_REDUCER)
    if getattr(model, "_delay_all_reduce_params", None):
        raise ConfigError(
            "delay_all_reduce_named_params= bypasses communication hooks: wrap the model without it"
        )
    if getattr(model, "_comm_hooks", None):
        raise ConfigError(_SECOND_HOOK)
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(
            module, (torch.nn.Embedding, torch.nn.EmbeddingBag)
        ):
            raise ConfigError(
                f"{name or type(module).__name__} makes sparse gradients, which cannot be reduced: "
                "build it with sparse=False"
            )


def _advise(model: DistributedDataParallel) -> None:
    """Log how to get larger buckets, if the model would fill more than one of DDP's own size."""
    if not getattr(model, "bucket_bytes_cap_default", False):
        return  # somebody chose the size
    gradients = sum(p.nbytes for p in model.module.parameters() if p.requires_grad)
    if gradients > model.bucket_bytes_cap:
        log.warning(
            "%d MiB of gradients go in buckets of %d MiB, DDP's default; larger ones keep the "
            "network busy: wrap the model with DistributedDataParallel(..., bucket_cap_mb=%d)",
            gradients >> 20,
            model.bucket_bytes_cap >> 20,
            DEFAULT_BUCKET_CAP_MB,
        )


def _queue_callback(callback: Any) -> None:
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 (no public name)
    engine.queue_callback(callback)


def _as_reduction_error(error: BaseException) -> ReductionError:
    return error if isinstance(error, ReductionError) else ReductionError(repr(error))
