"""What `worker_client.horovod` has, by the name of Horovod's module.

So one command changes a script: ``sed -i 's/horovod[.]torch/worker_client.horovod.torch/'``.
"""

from __future__ import annotations

from worker_client.horovod import *  # noqa: F403
from worker_client.horovod import __all__, __getattr__  # noqa: F401
