"""Lightning: `Trainer(strategy="reduction")`, and the same for Fabric.

Importing this module registers the strategies. Lightning itself passes a communication hook on to
DDP on CUDA devices alone, and says nothing on others; these strategies attach to the wrapped model
wherever it is.

There are two Lightnings, the package `lightning` and the pair `pytorch_lightning` and
`lightning_fabric`, whose classes do not mix. The one that the script has imported is served, or
else the one that is installed, `lightning` first.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from os import path
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

import worker_client
from reducer.errors import ConfigError
from worker_client import config, ddp
from worker_client.client import bootstrap
from worker_client.collectives import broadcast
from worker_client.leaves import LeafStep, Leaves
from worker_client.local_sgd import PeriodicModelAverager, post_local_sgd

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.client.client import Client

NAME = "reduction"
NAME_UNUSED = "reduction_find_unused_parameters_true"


def _packages() -> tuple[str, str]:
    """Return where the Trainer's and Fabric's classes are."""
    both = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
    for pair in both:
        if pair[1] in sys.modules:
            return pair
    return both[0] if find_spec("lightning") is not None else both[1]


# By name, because it is known only here which ones; to a type checker they are Any.
_PYTORCH, _FABRIC = _packages()
_TrainerStrategy: Any = import_module(f"{_PYTORCH}.strategies").DDPStrategy
_FabricStrategy: Any = import_module(f"{_FABRIC}.strategies").DDPStrategy
_ClusterEnvironment: Any = import_module(f"{_FABRIC}.plugins.environments").ClusterEnvironment


class ReductionStrategy(_TrainerStrategy):  # type: ignore[misc]
    """Lightning's DDP strategy with gradients averaged by the reducers.

    ``Trainer(strategy="reduction")`` makes one with defaults. With error feedback a checkpoint
    ``FOLDER/NAME`` has each rank's residuals beside it, in ``FOLDER/reduction/NAME.RANK``.

    Args:
        client: the one to use, which the strategy leaves running. By default `worker_client.init()`
            is called for each `fit`, and what it made is shut down when `fit` ends.
        bucket_cap_mb: DDP's, 64 by default.
        ddp_comm_wrapper: applied to the hook, such as PyTorch's `fp16_compress_wrapper`.
        ddp_comm_hook: PyTorch's `post_localSGD_hook`, which averages gradients for some steps only.
        ddp_comm_state: its `PostLocalSGDState`.
        model_averaging_period: steps from one averaging of the weights to the next, after these.
        options: any other arguments of Lightning's `DDPStrategy`, and so of DDP.

    Raises:
        ConfigError: another communication hook is asked for, or one of the last three arguments
            without the others.
    """

    def __init__(
        self,
        *,
        client: Client | None = None,
        bucket_cap_mb: float = ddp.DEFAULT_BUCKET_CAP_MB,
        ddp_comm_wrapper: Any = None,
        ddp_comm_hook: Any = None,
        ddp_comm_state: Any = None,
        model_averaging_period: int | None = None,
        **options: Any,
    ) -> None:
        if ddp_comm_hook not in {None, post_localSGD_hook}:
            raise ConfigError(
                "ddp_comm_hook= asks for another communication hook, and DDP takes one: leave it "
                "out, or use Lightning's DDPStrategy without reducers"
            )
        local = ddp_comm_hook is not None
        if isinstance(ddp_comm_state, PostLocalSGDState) != local or (
            (model_averaging_period is not None) != local
        ):
            raise ConfigError(
                "ddp_comm_hook=post_localSGD_hook, ddp_comm_state=PostLocalSGDState(...) and "
                "model_averaging_period= go together: give all three, or none"
            )
        # Not the hook, which Lightning would register.
        super().__init__(
            bucket_cap_mb=bucket_cap_mb,
            ddp_comm_state=ddp_comm_state,
            model_averaging_period=model_averaging_period,
            **options,
        )
        self.client = client
        self._given = client
        self._wrapper = ddp_comm_wrapper
        if local:
            first_steps = post_local_sgd(ddp_comm_state)
            outer = ddp_comm_wrapper or (lambda hook: hook)
            self._wrapper = lambda hook: outer(first_steps(hook))
        self._ours = False
        self._failed = False
        self._resumed: str | None = None  # the checkpoint that the next fit goes on from

    def configure_ddp(self) -> None:
        """Wrap the model, and attach to it; Lightning calls this when a fit begins."""
        super().configure_ddp()
        ddp.attach(self.model, self._join(), wrapper=self._wrapper)
        if self._resumed is not None:
            with contextlib.suppress(FileNotFoundError):  # saved without error feedback
                kept = self.checkpoint_io.load_checkpoint(self._residuals(self._resumed))
                ddp.state_of(self.model).load_state_dict(kept)

    def _join(self) -> Client:
        self._failed = False
        self._ours = self._given is None and not bootstrap.DEFAULT.exists
        self.client = worker_client.init() if self._given is None else self._given
        return self.client

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, and this rank's residuals; Lightning calls this at all ranks."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        for state in ddp.states_of([self.model]):  # none before the first fit
            kept = state.state_dict()
            if kept["residuals"]:
                self.checkpoint_io.save_checkpoint(kept, self._residuals(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and this rank's residuals; Lightning calls this at all ranks."""
        super().remove_checkpoint(filepath)
        self.checkpoint_io.remove_checkpoint(self._residuals(filepath))

    def load_checkpoint(self, checkpoint_path: Any, *given: Any, **options: Any) -> dict[str, Any]:
        """Load a checkpoint, and remember which; Lightning calls this before `configure_ddp`."""
        self._resumed = checkpoint_path
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *given, **options)
        return loaded

    def _residuals(self, checkpoint: Any) -> str:
        """Return where a checkpoint's are, apart from checkpoints, as Lightning looks for those."""
        folder, name = path.split(checkpoint)
        return f"{folder or '.'}/reduction/{name}.{self.global_rank}"  # perhaps a URL's

    def _enable_model_averaging(self) -> None:
        """Let reducers average the weights; Lightning calls this after `configure_ddp`."""
        super()._enable_model_averaging()
        self._model_averager = PeriodicModelAverager(
            self._model_averaging_period, self._ddp_comm_state.start_localSGD_iter, self.client
        )

    def on_exception(self, exception: BaseException) -> None:
        """Remember that this rank may be the only one to tear down; Lightning calls this first."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave the job, and free what Lightning holds."""
        try:
            if self._ours and self.client is not None:
                self._leave(self.client)
        finally:
            self._ours, self._resumed = False, None
            super().teardown()

    def _leave(self, client: Client) -> None:
        everyone = not self._failed and len(client.present) == client.world_size
        if client.spec.hosts and everyone:
            self.barrier()  # others may still wait for results of the reducer that ends here
        client.shutdown()


class LeavesStrategy(ReductionStrategy):
    """Steps of leaves, whose weights are the same bits for any number of ranks (docs/leaves.md).

    ``Trainer(strategy=LeavesStrategy(24))``, and `worker_client.leaves.leaf_loader` for the data.
    The module is not wrapped in DDP. Its `training_step` is called once for each leaf, with that
    one's batch; `global_step` counts optimizer steps. Optimization is automatic.

    Args:
        count: leaves of a step, at all ranks together; one for each rank at least.
        seed: of the random numbers of leaves.
        client: as of `ReductionStrategy`.
    """

    def __init__(self, count: int, *, seed: int = 0, client: Client | None = None) -> None:
        super().__init__(client=client)
        self._count, self._seed = count, seed
        self._leaves: Leaves | None = None
        self._dealt: list[int] = []  # leaves of this rank
        self._place = 0  # among them, of the one in progress

    def configure_ddp(self) -> None:
        """Make what sums the gradients of leaves; Lightning calls this when a fit begins.

        Raises:
            ConfigError: the optimization is manual or accumulates batches; or as `Leaves`.
        """
        module = self.lightning_module
        if not module.automatic_optimization or module.trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                "LeavesStrategy makes a step of all leaves: leave out manual "
                "optimization, and in place of accumulate_grad_batches take more leaves"
            )
        client = self._join()
        self._leaves = Leaves(module, self._count, seed=self._seed, client=client)
        for parameter in module.parameters():  # rank 0's for all, as DDP does
            broadcast(client, parameter.detach())

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any
    ) -> Any:
        """Make an optimizer's step with the mean over all leaves; Lightning calls this."""
        return super().optimizer_step(optimizer, partial(self._reduced, closure), model, **options)

    def _reduced(self, closure: Callable[[], Any]) -> Any:
        assert self._leaves is not None
        step = LeafStep(self._leaves, self.lightning_module.trainer.global_step)
        self._dealt, result = list(step.share.numbers), None
        for self._place, _ in enumerate(step):
            result = closure()  # forward and backward pass
        step.reduce()
        return result

    def training_step(self, batches: Any, *given: Any) -> Any:
        """Call the module's with the batch of the leaf in progress; Lightning's closure does."""
        if [getattr(each, "leaf", None) for each in batches] != self._dealt:
            raise ConfigError(
                f"a step takes batches of the leaves {self._dealt} here: make the DataLoader with "
                f"worker_client.leaves.leaf_loader(), for {self._count} leaves"
            )
        return super().training_step(batches[self._place].batch, *given)


class ReductionFabricStrategy(_FabricStrategy):  # type: ignore[misc]
    """Fabric's DDP strategy with gradients averaged by the reducers.

    ``Fabric(strategy="reduction")`` makes one with defaults. Fabric never ends a strategy: the
    client leaves with the process. End a script with ``fabric.barrier()`` if ranks host reducers.

    Args:
        client: the one to use, by default `worker_client.init()`'s.
        bucket_cap_mb: DDP's, 64 by default.
        options: any other arguments of Fabric's `DDPStrategy`, and so of DDP.
    """

    def __init__(
        self,
        *,
        client: Client | None = None,
        bucket_cap_mb: float = ddp.DEFAULT_BUCKET_CAP_MB,
        **options: Any,
    ) -> None:
        super().__init__(bucket_cap_mb=bucket_cap_mb, **options)
        self.client = client

    def setup_module(self, module: Any) -> Any:
        """Wrap a module in DDP and attach to it; `Fabric.setup` calls this."""
        wrapped = super().setup_module(module)
        self.client = ddp.attach(wrapped, self.client)
        return wrapped


class ReductionEnvironment(_ClusterEnvironment):  # type: ignore[misc]
    """Who this process is, taken from the launcher: ``plugins=[ReductionEnvironment()]``.

    For launchers that set RANK and WORLD_SIZE and that Lightning does not know: it would count
    ranks by ``devices`` and ``num_nodes`` instead, and start processes of its own. LOCAL_RANK,
    LOCAL_WORLD_SIZE and MASTER_PORT are used too; without the first two there is one process on
    each machine.

    Raises:
        ConfigError: RANK, WORLD_SIZE or MASTER_PORT is missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._launch = launch = config.launch()
        missing = [
            name.upper()
            for name in ("rank", "world_size", "master_port")
            if getattr(launch, name) is None
        ]
        if missing:
            raise ConfigError(
                f"the launcher did not set {' and '.join(missing)}: start the script with "
                "torchrun, or leave out ReductionEnvironment() and let Lightning start the ranks"
            )

    @staticmethod
    def detect() -> bool:
        """Whether a launcher has said who this process is."""
        launch = config.launch()
        return launch.rank is not None and launch.world_size is not None

    @property
    def creates_processes_externally(self) -> bool:
        """That the launcher, not Lightning, starts the processes."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return self._launch.master_addr or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Port on which rank 0 lets the others meet."""
        return int(self._launch.master_port or 0)

    def world_size(self) -> int:
        """Return the number of ranks."""
        return int(self._launch.world_size or 0)

    def set_world_size(self, size: int) -> None:
        """Ignore what Lightning makes of ``devices`` and ``num_nodes``."""

    def global_rank(self) -> int:
        """Return this process's rank."""
        return int(self._launch.rank or 0)

    def set_global_rank(self, rank: int) -> None:
        """Ignore what Lightning makes of ``devices`` and ``num_nodes``."""

    def local_rank(self) -> int:
        """Return this process's number on its machine."""
        return self._launch.local_rank or 0

    def node_rank(self) -> int:
        """Return this machine's number."""
        if self._launch.node_rank is not None:
            return self._launch.node_rank
        return self.global_rank() // self._per_machine

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check that the Trainer's arguments make as many ranks as the launcher started.

        Raises:
            ConfigError: they do not; the message says what to write.
        """
        size, local = self.world_size(), self._per_machine
        known = self._launch.local_world_size is not None
        if num_devices * num_nodes != size or (known and num_devices != local):
            raise ConfigError(
                f"devices={num_devices} and num_nodes={num_nodes} are not what the launcher "
                f"started, {size} ranks with {local} on each machine: write devices={local} and "
                f"num_nodes={size // local}"
            )

    @property
    def _per_machine(self) -> int:
        return self._launch.local_world_size or 1


def _register(registry: Any, strategy: Any) -> None:
    description = "DDP whose gradients are averaged by reducers"
    registry.register(NAME, strategy, description=description, override=True)
    registry.register(
        NAME_UNUSED, strategy, description=description, override=True, find_unused_parameters=True
    )


_register(import_module(f"{_PYTORCH}.strategies").StrategyRegistry, ReductionStrategy)
_register(import_module(f"{_FABRIC}.strategies").STRATEGY_REGISTRY, ReductionFabricStrategy)
