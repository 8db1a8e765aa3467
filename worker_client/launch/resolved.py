"""What can be known of a process from its environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from reducer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Launcher(StrEnum):
    """Who started this process."""

    NONE = "none"
    TORCHRUN = "torchrun"
    ENV = "env://"
    KUBEFLOW = "Kubeflow"
    AZURE_ML = "Azure ML"
    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    SLURM = "SLURM"
    VERTEX = "Vertex AI"
    AI_PLATFORM = "AI Platform"
    TF_CONFIG = "TF_CONFIG"
    JOIN = "worker-client join"


class LauncherRole(StrEnum):
    """What this replica is there for."""

    WORKER = "worker"
    REDUCER = "reducer"
    EVALUATOR = "evaluator"


@dataclass(frozen=True)
class Resolved:
    """Who this process is; None is what nobody said."""

    launcher: Launcher = Launcher.NONE  # whose variables said who this process is
    role: LauncherRole = LauncherRole.WORKER
    rank: int | None = None  # if a process was started for each rank
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None  # launchers that start one process for each node say no more
    nodes: int | None = None
    master_addr: str | None = None  # where rank 0 lets the others meet
    master_port: int | None = None
    # The launcher keeps a store there from before the first rank's start until after the last one's
    # end.
    holds_port: bool = False
    reducers: tuple[str, ...] = ()  # ``host:port`` of each, in the same order at every replica
    job: str | None = None  # its name, the same in all its processes, and not that of another job
    generation: int = 0
    restarts: int = 0  # how often the launcher has started it anew
    trial: str | None = None  # its number, if hyperparameters are tuned
    processes: str | None = None  # that the launcher wants on each node, in torchrun's words
    reasons: Mapping[str, str] = field(default_factory=dict)  # by field, which variable said so
    also: tuple[Launcher, ...] = ()  # other launchers whose variables are there
    # The variable by which this process was started with others, and its value, where nothing says
    # which one of them it is.
    others: str = ""

    @property
    def identity(self) -> tuple[int | None, int | None]:
        """Rank and world size; where only nodes are known, this process is its node's only one."""
        if self.rank is None and self.world_size is None:
            return self.node_rank, self.nodes
        return self.rank, self.world_size

    def check_alone(self) -> None:
        """Check that this process may be taken for a job of its own, where nobody gives it a rank.

        Raises:
            ConfigError: it was started with others; the message quotes what says so.
        """
        if self.others:
            raise ConfigError(
                f"{self.others}: this process is one of several, and nothing says which one: set "
                "RANK and WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each of them, or "
                f"unset {self.reasons['others']} if it is alone"
            )

    def described(self) -> list[tuple[str, str, str]]:
        """Return what is known, for people: field, value, and the variable that said so."""
        rows = []
        for name in _SHOWN:
            value = getattr(self, name)
            if value not in {None, ()}:
                text = ",".join(value) if isinstance(value, tuple) else str(value)
                text = value.value if isinstance(value, Enum) else text
                rows.append((name, text, self.reasons.get(name, "")))
        if self.also:
            others = ", ".join(other.value for other in self.also)
            rows.append(("also there", others, f"{self.launcher.value} goes before"))
        return rows


_SHOWN = (
    *("launcher", "role"),
    *("rank", "world_size", "local_rank", "local_world_size", "node_rank", "nodes"),
    *("master_addr", "master_port", "reducers", "job", "generation", "trial", "processes"),
)
