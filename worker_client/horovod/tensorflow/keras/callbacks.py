"""What `worker_client.horovod.keras.callbacks` has."""

from __future__ import annotations

from worker_client.horovod.keras.callbacks import *  # noqa: F403
from worker_client.horovod.keras.callbacks import __all__  # noqa: F401
