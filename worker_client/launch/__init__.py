"""Who this process is and what it is to do, by what a launcher said: a pure function, and a plan.

`resolve` reads an environment, `decide` says what `worker-client launch` runs there. Neither does
anything: `worker_client.config` hands the environment in, `worker_client.commands.launch` acts.
"""

from worker_client.launch.decide import LaunchDecision, decide
from worker_client.launch.resolve import resolve
from worker_client.launch.resolved import Launcher, LauncherRole, Resolved

__all__ = ["LaunchDecision", "Launcher", "LauncherRole", "Resolved", "decide", "resolve"]
