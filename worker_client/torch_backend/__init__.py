"""torch.distributed backend ``reduction``: all-reduces through reducers, the rest through Gloo.

``torch.distributed.init_process_group("reduction")`` is all that a script changes: torch 2.14 and
later find the backend by its name, and for older ones ``import worker_client.torch_backend``
registers it. A group keeps a Gloo group of the same ranks inside, registered as the backend of its
devices, which does the rest.
"""

from __future__ import annotations

import atexit
import functools
import logging
import secrets
import threading
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined] # (one is untyped)
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BuiltinCommHookType,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Reducer,
    ReduceScatterOptions,
    _create_work_from_future,
    _DistributedBackendOptions,
)
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel

from reducer.errors import ConfigError, LocalProtocolError
from worker_client.client import bootstrap
from worker_client.client.rendezvous import Rendezvous
from worker_client.staging.arguments import parse_op
from worker_client.torch_backend.collectives import (
    DEVICES,
    OPS,
    Reduction,
    asked,
    either,
    inner,
    op_name,
    packed,
    reducible,
    scattered,
    take_in,
)
from worker_client.torch_backend.work import ReductionWork, untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._C._distributed_c10d import Store
    from torch._C._distributed_c10d import Work as TorchWork

    from worker_client.client.client import Client

NAME = "reduction"
OLDEST = "2.7.0.dev0"  # torch
_DESTROYED = "the process group was destroyed: make a new one"

log = logging.getLogger(__name__)


_GLOOS = ConfigError("Gloo makes this reduction: not every tensor and reduction can go to reducers")


@untraced
class ReductionGroup(ProcessGroup):
    """A process group whose all-reduces and reduce-scatters go through reducers.

    The default group joins its job at once. Each group made of it is a job of its own on the
    reducers, ``JOB.GROUP``, which its members join with their first reduction. Where torch can give
    a group other members (``init_process_group(enable_reconfigure=True)``, since 2.14), it has none
    before the first `reconfigure`, each of which makes a job of its own, too.

    Args:
        options: what torch knows of the group: its store, ranks, name and timeout.

    Raises:
        ConfigError: a setting is wrong; the message says what to write.
        ReducerLostError: a reducer did not answer; the message names it.
    """

    def __init__(self, options: Any, _: object = None) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._reconfigures = bool(getattr(options, "enable_reconfigure", False))
        more = {"enable_reconfigure": True} if self._reconfigures else {}
        self._gloo = ProcessGroupGloo(options.store, rank, size, timeout=options.timeout, **more)
        take_in(self, self._gloo)
        # The same without this class's methods, which C++ code would call again.
        self._inner = ProcessGroup(options.store, rank, size)
        take_in(self._inner, self._gloo)
        self._options = options
        self._store = options.store
        self._client: Client | None = None
        self._closed: str | None = None  # why there is no client, and will be none
        self._warned = False
        self._declined = 0  # reductions that Gloo has made before there was a client
        self._splits: Counter[tuple[int, ...]] = Counter()  # how often members have split off
        self._joining = threading.Lock()
        self._calls = 0  # reductions started so far, by reducers or Gloo
        self._starting = threading.RLock()  # they are counted in the order in which they start
        self._callback = threading.local()  # ``after``: the call that one here has to follow
        if not options.global_ranks_in_group and size > 1 and not self._reconfigures:
            self.join()  # all ranks are here, which later need not be so

    @property
    def client(self) -> Client | None:
        """The client that this group's reductions go through, None while it has none."""
        return self._client

    def join(self) -> Client:
        """Return the group's client, made if there is none; then all members must come here.

        Raises:
            ReductionError: as `worker_client.init`.
        """
        with self._joining:
            if self._closed is not None:
                raise LocalProtocolError(self._closed)
            if self._client is None:
                self._client = self._connect()
                for _ in range(self._declined):
                    self._client.decline(_GLOOS)
                atexit.register(self._client.shutdown)  # for scripts that destroy no group
            return self._client

    def _connect(self) -> Client:
        """Join the job of this group: the parent's name and its own, or what its ranks agree on."""
        options = self._options
        rank, size, store = options.group_rank, options.group_size, options.store

        number = count()

        ranks = tuple(options.global_ranks_in_group or range(size))

        def make_private(
            timeout_s: float, all_of: Sequence[Sequence[int]], *, backend: str = "gloo"
        ) -> ProcessGroup:
            assert backend == "gloo", "it has said that it makes no others"
            mine = next(some for some in all_of if ranks[rank] in some)
            apart = PrefixStore(f"reduction/private/{next(number)}/{mine[0]}", store)
            place = mine.index(ranks[rank]), len(mine)
            group = ProcessGroup(apart, *place)
            timeout = timedelta(seconds=timeout_s)
            take_in(group, ProcessGroupGloo(apart, *place, timeout=timeout))
            return group

        parent = dist.group.WORLD if dist.is_initialized() else None
        known = parent.client if isinstance(parent, ReductionGroup) else None
        if known is not None and known.spec.world_size != known.world_size:
            known = None  # each local rank has a job of its own
        return bootstrap.connect(
            job=None if known is None else known.spec.job,
            timeout=self._given_timeout_s(),
            group=Rendezvous(
                rank,
                ranks,
                PrefixStore("reduction", store),
                make_private=make_private,
                name=str(options.group_id) if options.global_ranks_in_group else "",
                timeout_s=options.timeout.total_seconds(),
            ),
        )

    def _given_timeout_s(self) -> float | None:
        """Return the group's timeout in seconds, None if it is torch's default.

        It is the inner group's, where torch keeps the one that is set later.
        """
        timeout = self._gloo.options._timeout  # noqa: SLF001 (no public name)
        return None if timeout == default_pg_timeout else timeout.total_seconds()

    # -- other members ------------------------------------------------------------------------

    def rank(self) -> int:
        """Return the number of this rank among the members."""
        return int(self._options.group_rank)

    def size(self) -> int:
        """Return the number of members."""
        return int(self._options.group_size)

    getRank = rank  # noqa: N815 (C++ looks for these by their names there)
    getSize = size  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name, not that of Gloo inside."""
        return NAME

    def get_group_store(self) -> Store:
        """Return the store in which the members meet."""
        return self._store  # type: ignore[no-any-return]

    def split_group(  # type: ignore[override] # (torch gives the others by name)
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        *,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> ReductionGroup | None:
        """Return a group of some members; `torch.distributed.split_group` describes it.

        Args:
            new_ranks: ranks of its members in this group; a rank's place is its rank there.
            timeout: of the group's collectives; None takes this group's.
            opts: of no use here.
            group_name: the same at all members, and new; without one it is made of their ranks,
                and of how often these have split before.
            group_desc: of the group.
            device_types: of no use here: a group is of all devices.

        Returns:
            The group; None at a rank that is not among them.

        Raises:
            ConfigError: `new_ranks` names none, one twice or one that this group does not have.
        """
        del opts, device_types
        members = set(new_ranks)
        if not members or len(members) < len(new_ranks) or not members <= set(range(self.size())):
            raise ConfigError(
                f"split_group takes different ranks of the {self.size()} in this group, at least "
                f"one, got {new_ranks}"
            )
        if self.rank() not in members:
            return None
        number = self._splits[tuple(new_ranks)]
        self._splits[tuple(new_ranks)] += 1
        name = group_name or f"{self.group_name}:split:{new_ranks}:{number}"
        ranks = self._options.global_ranks_in_group or range(self.size())
        some = _DistributedBackendOptions()
        some.store = PrefixStore(f"{name}/", self._store)
        some.group_rank, some.group_size = new_ranks.index(self.rank()), len(new_ranks)
        some.timeout = self._options.timeout if timeout is None else timeout
        some.group_id = name
        some.global_ranks_in_group = [ranks[rank] for rank in new_ranks]
        group = ReductionGroup(some)
        group._set_group_name(name)  # type: ignore[arg-type] # (a str by another name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group can be given other members."""
        return self._reconfigures

    def get_reconfigure_handle(self) -> str:
        """Return what the other members need to know of this one."""
        handle: str = self._gloo.get_reconfigure_handle()  # type: ignore[attr-defined]
        return handle

    def reconfigure(self, opts: Any) -> TorchWork:
        """Leave the job of the members so far, and join one of those given.

        All that is in progress fails. The new members have met when this returns.

        Args:
            opts: ``uuid``, a number that no members of this store had before, the same at all;
                ``handles`` of the members, in the order of their ranks if it is a list; ``timeout``
                for them to come.

        Returns:
            A work handle that is complete already.

        Raises:
            RuntimeError: torch's, if they do not come, or the number was used.
            ReductionError: as `worker_client.init`.
        """
        # First: members so far may wait for this rank's part, and not come here before that fails.
        self._leave("the process group has no members: reconfigure it")
        self._gloo.reconfigure(opts).wait()  # type: ignore[attr-defined]
        members = _DistributedBackendOptions()
        members.store = PrefixStore(f"reduction/members/{opts.uuid}", self._store)
        members.group_rank, members.group_size = self._gloo.rank(), self._gloo.size()
        members.timeout = self._options.timeout
        # Another run may count from the same number.
        if members.group_rank == 0:
            members.store.set("run", secrets.token_hex(4))
        members.group_id = f"{opts.uuid}.{members.store.get('run').decode()}"
        members.global_ranks_in_group = list(range(members.group_size))
        with self._joining:
            self._options, self._client, self._declined = members, None, 0
            self._closed = None
        if members.group_size > 1:
            self.join()
        return ReductionWork([], [])

    def shutdown(self) -> None:
        """Leave the job and the inner group; what is in progress fails."""
        self._leave(_DESTROYED)
        self._inner.shutdown()

    def abort(self) -> None:
        """Do as `shutdown` does, which waits for nobody either."""
        self._leave(_DESTROYED)
        self._inner.abort()

    def _leave(self, why: str) -> None:
        with self._joining:
            self._closed = why
            if self._client is not None:
                self._client.shutdown()

    # -- what reducers do ---------------------------------------------------------------------

    def allreduce(  # type: ignore[override] # (one method for its overloads)
        self,
        tensors: torch.Tensor | list[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> TorchWork:
        """Reduce a tensor in place; `torch.distributed.all_reduce` describes it."""
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        options = asked(AllreduceOptions(), opts if op is None else op, timeout)
        if self._can_reduce(given, options.reduceOp):
            return self._reduce(Reduction(given, given), options)
        self._count()
        return self._inner.allreduce(given, options)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        """Reduce tensors in place, those of one dtype as one buffer."""
        options = asked(AllreduceCoalescedOptions(), opts, None)
        if self._can_reduce(tensors, options.reduceOp):
            op = parse_op(OPS[op_name(options.reduceOp)])
            return self._reduce(packed(tensors, self.join(), op), options)
        self._count()
        return self._inner.allreduce_coalesced(tensors, options)

    def reduce_scatter(
        self,
        outputs: torch.Tensor | list[torch.Tensor],
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Keep the reduction of this rank's tensor of a list; see `reduce_scatter`."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        options = asked(ReduceScatterOptions(), opts, timeout)
        whole = all(len(per_rank) == self.size() for per_rank in inputs)  # else Gloo refuses it
        given = [one for per_rank in inputs for one in per_rank]
        if whole and self._takes(given, options.reduceOp):
            return self._reduce(scattered(outputs, inputs, self.rank()), options)
        self._count()
        return self._inner.reduce_scatter(outputs, inputs, options)

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> TorchWork:
        """Keep this rank's part of a tensor's reduction; see `reduce_scatter_tensor`."""
        options = asked(ReduceScatterOptions(), opts, None)
        if self._can_scatter([output], [whole], options.reduceOp):
            return self._scatter([output], [whole], options)
        self._count()
        theirs = either(self._inner, "reduce_scatter_single", "_reduce_scatter_base")
        return theirs(output, whole, options)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> TorchWork:
        """Do as `reduce_scatter_single` does for several tensors."""
        options = asked(ReduceScatterOptions(), opts, None)
        if self._can_scatter(outputs, inputs, options.reduceOp):
            return self._scatter(outputs, inputs, options)
        self._count()
        names = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        return either(self._inner, *names)(outputs, inputs, options)

    # As torch called them before 2.13.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # -- what Gloo does -----------------------------------------------------------------------

    # C++ code looks for these in this class. Where it finds none it calls Gloo itself, and takes
    # the GIL with it (torch's PyProcessGroup): Gloo's lock may then be held by a thread of Gloo's
    # that waits for the GIL to free the last reference to a tensor, and both wait for ever.
    allgather = inner("allgather")
    all_gather_single = inner("all_gather_single", "_allgather_base")
    all_gather_single_coalesced = inner(
        "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
    )
    all_to_all_single = inner("all_to_all_single", "alltoall_base")
    alltoall = inner("alltoall")
    barrier = inner("barrier")
    broadcast = inner("broadcast")
    gather = inner("gather")
    recv = inner("recv")
    recv_anysource = inner("recv_anysource")  # by way of C++ its handle would lose the source
    recvAnysource = recv_anysource  # noqa: N815 (C++ looks for it by its name there)
    reduce = inner("reduce")
    scatter = inner("scatter")
    send = inner("send")
    # As torch called them before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count a reduction that is started meanwhile.

        Raises:
            LocalProtocolError: it is in a callback, and another one than it has to follow was
                started: at other ranks they may be the other way round. They hear of it.
        """
        with self._starting:
            after = getattr(self._callback, "after", None)
            if after not in {None, self._calls}:
                refusal = LocalProtocolError(
                    "a callback of a collective's future starts a reduction after others were "
                    "started elsewhere: their order may be another one at other ranks. Start it "
                    "when you have waited for the collective. For PowerSGD's hooks, give DDP a "
                    "bucket_cap_mb of the model's size"
                )
                self._decline(refusal)
                self._calls += 1
                raise refusal
            try:
                yield
            finally:
                self._calls += 1
                if after is not None:
                    self._callback.after = self._calls

    def _count(self) -> None:
        """Count a reduction that Gloo makes: where reducers make it, at other ranks, it fails."""
        with self._call():
            self._decline(_GLOOS)

    def _decline(self, why: Exception) -> None:
        """Take no part in the next reduction that reducers make."""
        with self._joining:
            if self._client is None:
                self._declined += self.size() > 1
            elif self._client.usable:
                self._client.decline(why)

    def _can_reduce(self, tensors: list[torch.Tensor], op: dist.ReduceOp) -> bool:
        if not self._warned and any(tensor.device.type != "cpu" for tensor in tensors):
            self._warned = True
            log.warning("tensors that are not on the CPU are reduced by Gloo, not by reducers")
        return self.size() > 1 and reducible(tensors, op)

    def _takes(self, inputs: list[torch.Tensor], op: dist.ReduceOp) -> bool:
        """Whether a reduce-scatter goes without Gloo, whose handles of them have no future."""
        return op_name(op) in OPS if self.size() == 1 else self._can_reduce(inputs, op)

    def _can_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: dist.ReduceOp
    ) -> bool:
        return self._takes(inputs, op) and all(
            output.dtype == whole.dtype and output.numel() * self.size() == whole.numel()
            for output, whole in zip(outputs, inputs, strict=True)
        )

    def _scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> TorchWork:
        parts = [whole.reshape(-1).tensor_split(self.size()) for whole in inputs]
        return self._reduce(scattered(outputs, parts, self.rank()), options)

    def _reduce(self, reduction: Reduction, options: Any) -> ReductionWork:
        if self.size() == 1:
            alone = ReductionWork([], reduction.results, reduction.finish)
            alone.wait()
            return alone
        client = self.join()
        timeout_s = options.timeout.total_seconds()
        if timeout_s <= 0:  # torch's way to say: the group's
            timeout_s = self._given_timeout_s() or client.timeout_s
        op = OPS[op_name(options.reduceOp)]
        with self._call():
            works = [
                client.all_reduce(buffer, op, timeout=timeout_s) for buffer in reduction.buffers
            ]
            number = self._calls + 1

        def begin() -> None:
            self._callback.after = number

        return ReductionWork(works, reduction.results, reduction.finish, begin=begin)


def register() -> None:
    """Make ``init_process_group("reduction")`` known to torch, which it may be already.

    Raises:
        ConfigError: this torch cannot have it.
    """
    if torch.__version__ < OLDEST:  # and before its pre-releases
        raise ConfigError(
            f"the backend needs torch 2.7 or later, this is {torch.__version__}: DDP asks a "
            "Python backend's work for its future, which older ones refuse"
        )
    if NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001 (no public name)
        dist.Backend.register_backend(NAME, ReductionGroup, extended_api=True, devices=DEVICES)
        _replace_fp16_compress()
        _replace_kept_handles()
        if torch.__version__ < "2.15":
            _replace_monitored_barrier()


def _replace_fp16_compress() -> None:
    """Give DDP models over this backend torch's Python hook where they ask for its C++ twin.

    `FP16_COMPRESS` asserts that the all-reduce's future holds a C++ list, and a future made in
    Python holds an object. There is no such assertion in `ALLREDUCE`, DDP's default.
    """
    ddp: Any = DistributedDataParallel
    builtin = ddp._register_builtin_comm_hook

    @functools.wraps(builtin)
    def register_hook(model: Any, comm_hook_type: BuiltinCommHookType) -> None:
        fp16 = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
        if fp16 and isinstance(model.process_group, ReductionGroup):
            model.register_comm_hook(model.process_group, fp16_compress_hook)
        else:
            builtin(model, comm_hook_type)

    ddp._register_builtin_comm_hook = register_hook


def _replace_kept_handles() -> None:
    """Give C++ code that keeps the handle of a reduction one that C++ made.

    It would keep its half of a Python object, whose methods are gone with the other half, and wait
    for ever: DDP does so in `join(divide_by_initial_world_size=False)`.
    """
    for owner, name in (
        (Reducer, "_set_forward_pass_work_handle"),
        (torch._C._distributed_c10d, "_register_work"),
    ):
        setattr(owner, name, _with_kept_handle(getattr(owner, name)))


def _with_kept_handle(keep: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(keep)
    def keep_handle(reducer_or_tensor: Any, work: TorchWork, *given: Any) -> Any:
        if isinstance(work, ReductionWork):
            work = _create_work_from_future(work.get_future())
        return keep(reducer_or_tensor, work, *given)

    return keep_handle


def _replace_monitored_barrier() -> None:
    """Let `torch.distributed.monitored_barrier` take this backend's groups.

    Before 2.15 it refuses all that do not go by Gloo's name.
    """
    modules: list[Any] = [distributed_c10d, dist]
    monitored = modules[0].monitored_barrier

    @functools.wraps(monitored)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        given = dist.group.WORLD if group is None else group
        if isinstance(given, ReductionGroup):
            limit = default_pg_timeout if timeout is None else timeout
            given.monitored_barrier(limit, wait_all_ranks)  # type: ignore[attr-defined]
        else:
            monitored(group, timeout, wait_all_ranks)

    for module in modules:
        module.monitored_barrier = monitored_barrier


def bytes_reduced() -> int:
    """Return the bytes that reducers have reduced for all groups of this process that there are."""
    groups = [group for group in _world.pg_map if isinstance(group, ReductionGroup)]
    return sum(group.client.bytes_reduced for group in groups if group.client is not None)


register()
