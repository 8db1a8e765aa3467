"""What staging needs of a device: page-locked host memory, and copies that run by themselves.

A device has one stream for each way, a queue of copies that it makes one after another while
nobody waits. `worker_client.staging.cuda` has the one there is so far.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch


# By type of torch's devices: those of `worker_client.staging.host_buffer.STAGED`.
_MODULES = {"cuda": ("worker_client.staging.cuda", "CudaDevice")}


class Copy(Protocol):
    """A copy that was asked for."""

    def wait(self) -> None:
        """Block until it has been made; any thread may.

        Raises:
            DeviceError: the device failed.
        """

    def done(self) -> bool:
        """Whether it has been made; raises as `wait`."""


class Device(Protocol):
    """One device; any thread may call it. Each of its methods may raise `DeviceError`."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked memory of the host, as bytes."""

    def follow(self, *tensors: torch.Tensor) -> None:
        """Let later copies to the host wait for what this thread's current stream has to do so far.

        Args:
            tensors: what will be copied, or copied to; their memory is kept for as long.

        Raises:
            ConfigError: the current stream is being captured, not run.
        """

    def to_host(self, block: torch.Tensor, source: torch.Tensor) -> Copy:
        """Ask for a copy from the device to page-locked memory, of the same shape and dtype."""

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Ask for a copy to the device, from page-locked memory or from the device itself."""

    def mark(self, *tensors: torch.Tensor) -> Any:
        """Return what stands for all that this thread's current stream has to do so far.

        Takes what `follow` takes, and raises as it does.
        """

    def leaving(self, mark: Any) -> AbstractContextManager[object]:
        """Make the stream of copies to the host this thread's current one, behind a mark."""

    def returning(self) -> AbstractContextManager[object]:
        """Make the stream of copies to the device this thread's current one."""


def open_device(device: torch.device) -> Device:
    """Return a device with streams of its own."""
    module, name = _MODULES[device.type]
    opened: Device = getattr(import_module(module), name)(device)
    return opened
