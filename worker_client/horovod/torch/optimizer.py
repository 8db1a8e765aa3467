"""`DistributedOptimizer`: gradients are reduced while the backward pass goes on.

A hook at each parameter starts its all-reduce when its gradient is complete, and never waits;
`step()` waits for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reducer.errors import ConfigError, LocalProtocolError
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.groups import start_allreduce, start_sparse
from worker_client.horovod.job import CURRENT
from worker_client.horovod.ops import LINEAR, Handle, Op, check_passes, predivided, wait_for_all
from worker_client.horovod.torch.compression import Compression

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from worker_client.horovod.groups import Group
    from worker_client.horovod.torch.compression import Compressor


class _Options(NamedTuple):
    """How gradients are reduced; `DistributedOptimizer` describes it."""

    group: Group
    compression: Compressor
    op: Op
    scales: tuple[float, float]
    sparse_as_dense: bool


@dataclasses.dataclass(eq=False, slots=True)
class _Bundle:
    """Parameters, at least one, whose gradients travel together."""

    name: str
    parameters: Sequence[torch.Tensor]
    left: list[int]  # backward passes, until each gradient is complete
    handle: Handle | None = None  # of the reduction, once it has started


class _OwnGradients:
    """All gradients of one optimizer: which are complete, and which have started.

    Parameters of one of the `groups` travel together, others alone. Without `options` nothing is
    reduced.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        groups: Sequence[Sequence[torch.Tensor]],
        options: _Options | None,
        passes: int,
    ) -> None:
        self._options = options
        self._passes = passes
        self._bundles: list[_Bundle] = []
        self._started: list[_Bundle] = []
        if options is not None:
            self._prefix = f"optimizer{options.group.optimizers}"  # several may be on their way
            options.group.optimizers += 1
        names = {parameter: name for name, parameter in named}
        grouped = {parameter for group in groups for parameter in group}
        alone = [[parameter] for _, parameter in named if parameter not in grouped]
        for members in (*groups, *alone):
            self.add(names[members[0]], members)

    @property
    def pending(self) -> bool:
        """Whether there was a backward pass, and no `synchronize` since."""
        return any(left < self._passes for bundle in self._bundles for left in bundle.left)

    def add(self, name: str, members: Sequence[torch.Tensor]) -> None:
        """Take on parameters that travel together; those that need no gradient are left out."""
        trained = [parameter for parameter in members if parameter.requires_grad]
        if not trained or self._options is None:
            return
        bundle = _Bundle(f"{self._prefix}.{name}", trained, [self._passes] * len(trained))
        self._bundles.append(bundle)
        for at, parameter in enumerate(trained):
            hook = functools.partial(_completed, weakref.ref(self), bundle, at)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def set_passes(self, passes: int) -> None:
        """Set after how many backward passes gradients are complete, from now on."""
        self._passes = passes
        self.reset()

    def reset(self) -> None:
        """Forget what has started and which backward passes there were."""
        self._started = []
        for bundle in self._bundles:
            bundle.handle, bundle.left = None, [self._passes] * len(bundle.left)

    def completed(self, bundle: _Bundle, at: int) -> None:
        """Count a backward pass that has computed one gradient of a bundle."""
        if bundle.left[at] == 0:
            raise LocalProtocolError(
                "gradients were computed more often than backward_passes_per_step since the last "
                "step(): raise backward_passes_per_step to accumulate more of them"
            )
        bundle.left[at] -= 1
        if not any(bundle.left):
            self._start(bundle)

    def synchronize(self) -> None:
        """Start what has not started, and wait until nothing is in progress any more."""
        try:
            for bundle in self._bundles:
                trained = any(parameter.requires_grad for parameter in bundle.parameters)
                if trained and bundle not in self._started:
                    self._start(bundle)
        finally:
            handles = [bundle.handle for bundle in self._started if bundle.handle is not None]
            self.reset()
            wait_for_all(handles)

    def _start(self, bundle: _Bundle) -> None:
        """Start the reduction of gradients; one that was not computed counts as zeros."""
        assert self._options is not None  # else there are no bundles
        self._started.append(bundle)
        group, compression, op, scales, sparse_as_dense = self._options
        grads = [parameter.grad for parameter in bundle.parameters]
        if not sparse_as_dense and any(grad is not None and grad.is_sparse for grad in grads):
            bundle.handle = _gather(bundle, group, op)
            return
        narrowed = []
        for parameter in bundle.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            narrowed.append(compression.compress(grad.detach()))
        tensors = [tensor for tensor, _ in narrowed]
        reduction = start_allreduce(group, tensors, bundle.name, (op, None), scales, list)

        def finish() -> None:
            for parameter, (tensor, ctx) in zip(bundle.parameters, narrowed, strict=True):
                _replace(parameter, compression.decompress(tensor, ctx))

        bundle.handle = Handle([reduction], finish)


def _completed(to: weakref.ref[_OwnGradients], bundle: _Bundle, at: int, _: torch.Tensor) -> None:
    """Do what a parameter's hook does: nothing once the optimizer is gone."""
    gradients = to()
    if gradients is not None:
        gradients.completed(bundle, at)


def _gather(bundle: _Bundle, group: Group, op: Op) -> Handle:
    """Start the reduction of a sparse gradient, which needs all ranks' indices."""
    parameter, grad = bundle.parameters[0], bundle.parameters[0].grad
    if len(bundle.parameters) > 1 or grad is None or op not in LINEAR:
        raise ConfigError(
            f"the sparse gradient of {bundle.name} can be reduced alone, by Average or Sum: use "
            "sparse_as_dense=True, or leave it out of groups="
        )
    reduction = start_sparse(group, grad, bundle.name, op)
    return Handle([reduction], lambda: _replace(parameter, reduction.wait()))


def _replace(parameter: torch.Tensor, reduced: torch.Tensor) -> None:
    """Let a gradient be what it was reduced to; nothing is copied if it was reduced in place."""
    grad = parameter.grad
    if grad is None or reduced.is_sparse:
        parameter.grad = reduced
    elif grad.is_sparse:
        parameter.grad = reduced.to_sparse(grad.sparse_dim())
    elif reduced.data_ptr() != grad.data_ptr():
        grad.copy_(reduced)


class _Distributed(torch.optim.Optimizer):
    """What is put before an optimizer's own class."""

    _gradients: _OwnGradients
    _parameter_names: dict[torch.Tensor, str]  # Horovod's name, which scripts read
    _synchronized = False
    _synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set after how many backward passes gradients are reduced, from now on."""
        self._gradients.set_passes(check_passes(passes))

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for instance to clip them before `step()`.

        Raises:
            ReductionError: an all-reduce failed; the class and its attributes say why.
        """
        self._gradients.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` not synchronize: `synchronize()` was called before."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Synchronize, unless that is skipped, and update the parameters.

        A `closure`, which computes the loss and its gradients, is called once, before; its result
        is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._synchronizes:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "synchronize(): gradients are reduced again; write 'with "
                    "optimizer.skip_synchronize(): optimizer.step()'",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        super().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            LocalProtocolError: they are being reduced or accumulated.
        """
        if self._gradients.pending:
            raise LocalProtocolError(
                "zero_grad() was called between backward() and step() or synchronize(), while "
                "gradients are reduced: call it before backward() or after step()"
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state; gradients that are not reduced yet are forgotten."""
        self._gradients.reset()
        self._synchronized = False
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are reduced from now on."""
        super().add_param_group(param_group)
        at = len(self.param_groups) - 1
        for number, parameter in enumerate(self.param_groups[at]["params"]):
            self._gradients.add(f"noname.{at}.{number}", [parameter])


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = ALL_RANKS,
) -> Any:
    """Return an optimizer like `optimizer`, of a subclass of its class, that reduces gradients.

    It shares parameters, options and state with the given one, which is not to be used any more.

    Args:
        optimizer: any but L-BFGS, which computes gradients in its step.
        named_parameters: `model.named_parameters()`; names all-reduces. Numbered if not given.
        compression: how gradients travel: `Compression.none`, `fp16` or `bf16`.
        backward_passes_per_step: how many add up before they are reduced; their sum is not divided.
        op: the reduction, `Average` by default.
        gradient_predivide_factor: gradients are divided by it before an average is taken, and
            multiplied afterwards.
        num_groups: the older name of `groups`.
        groups: into how many groups to divide the parameters, or lists of them; those of one group
            travel together.
        sparse_as_dense: whether sparse gradients travel as dense ones, instead of being gathered.
        process_set: the ranks that take part; at others the optimizer reduces nothing.

    Raises:
        ConfigError: an argument is wrong; the message says what to write. `init()` was not called.
    """
    job = CURRENT.job
    if job.in_elastic_function:
        raise ConfigError(
            "a DistributedOptimizer that is made in the function of hvd.elastic.run would be made "
            "again when ranks leave or join: make it before, and give it to the state"
        )
    if isinstance(optimizer, _Distributed):
        raise ConfigError("the optimizer is a DistributedOptimizer already: wrap it once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "torch.optim.LBFGS computes gradients inside its step, where they would not be "
            "reduced: use another optimizer"
        )
    chosen, scales = predivided(op, gradient_predivide_factor)
    named = _name(optimizer, named_parameters)
    options = None
    excluded = isinstance(process_set, ProcessSet) and process_set.included() is False
    if not excluded and not (group := group_of(process_set)).alone:
        options = _Options(group, compression, chosen, scales, sparse_as_dense)
    bundles = _group(named, num_groups or None if groups is None else groups)
    gradients = _OwnGradients(named, bundles, options, check_passes(backward_passes_per_step))

    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    names = {parameter: name for name, parameter in named}
    own = {"_gradients": gradients, "_parameter_names": names}
    wrapped.__dict__.update(optimizer.__dict__ | own)
    wrapped.__dict__.pop("step", None)  # a scheduler puts its own there, which steps the given one
    return wrapped


def _name(
    optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters with their names, in the optimizer's order."""
    parameters = {
        parameter: f"noname.{at}.{number}"
        for at, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
    }
    if given is None:
        return [(name, parameter) for parameter, name in parameters.items()]
    named = list(given)
    if any(not isinstance(one, tuple) for one in named):
        raise ConfigError(
            "named_parameters must be tuples of a name and a parameter: pass "
            "model.named_parameters()"
        )
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"names in named_parameters must differ: {', '.join(twice)}")
    known = {parameter: name for name, parameter in named}
    if missing := [name for parameter, name in parameters.items() if parameter not in known]:
        raise ConfigError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters (by group and "
            f"place: {', '.join(missing)}): pass those of the whole model"
        )
    return [(known[parameter], parameter) for parameter in parameters]


def _group(
    named: list[tuple[str, torch.Tensor]], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    """Return the groups of several parameters that were asked for."""
    if groups is None:
        return []
    known = [parameter for _, parameter in named]
    if isinstance(groups, int):
        if groups < 1:
            raise ConfigError(f"groups must be 1 or more, or lists of tensors, got {groups}")
        trained = [parameter for parameter in known if parameter.requires_grad]
        cuts = [len(trained) * at // groups for at in range(groups + 1)]
        parts = [trained[cut:end] for cut, end in itertools.pairwise(cuts)]
        return [part for part in parts if part]
    members = [one for group in groups for one in group]
    if any(not isinstance(one, torch.Tensor) for one in members):
        raise ConfigError("groups must be lists of tensors, such as [[model.a, model.b]]")
    if len({id(one) for one in members}) < len(members):
        raise ConfigError("a parameter may be in one of the groups alone")
    ours = {id(parameter) for parameter in known}
    kept = [[one for one in group if id(one) in ours] for group in groups]
    return [group for group in kept if group]
