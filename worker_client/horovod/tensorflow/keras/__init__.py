"""What `worker_client.horovod.keras` has: Keras 3 is TensorFlow's Keras."""

from __future__ import annotations

from worker_client.horovod.keras import *  # noqa: F403
from worker_client.horovod.keras import __all__  # noqa: F401
