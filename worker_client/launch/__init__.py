"""Who this process is and what it is to do, by what a launcher said: a pure function, and a plan.

`resolve` reads an environment, `decide` says what `worker-client launch` runs there. Neither does
anything: `worker_client.config` hands the environment in, `worker_client.commands.launch` acts.
"""

from worker_client.launch.decide import Decision, decide
from worker_client.launch.resolve import resolve
from worker_client.launch.resolved import Launcher, Resolved, Role

__all__ = ["Decision", "Launcher", "Resolved", "Role", "decide", "resolve"]
