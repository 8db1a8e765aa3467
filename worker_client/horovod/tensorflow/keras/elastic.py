"""What `worker_client.horovod.keras.elastic` has."""

from __future__ import annotations

from worker_client.horovod.keras.elastic import *  # noqa: F403
from worker_client.horovod.keras.elastic import __all__  # noqa: F401
