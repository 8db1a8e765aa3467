"""A CUDA device as staging sees it: two streams, and events on them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from reducer.errors import ConfigError, DeviceError, ReductionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


class CudaDevice:
    """One GPU, by `worker_client.staging.device.Device`.

    Both streams are apart from those that compute, so that a GPU copies both ways and computes at
    the same time: it has engines for each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with self._errors():
            self._to_host = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._to_device = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, nbytes: int) -> torch.Tensor:
        with self._errors(), torch.cuda.device(self._device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def follow(self, *tensors: torch.Tensor) -> None:
        with self.leaving(self.mark(*tensors)):
            pass

    def mark(self, *tensors: torch.Tensor) -> torch.cuda.Event:
        with self._errors(), torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise ConfigError(
                    "an all-reduce cannot become part of a CUDA graph: call it outside of "
                    "torch.cuda.graph()"
                )
            for tensor in tensors:
                # Freed memory is not given away while one of these streams may still use it.
                tensor.record_stream(self._to_host)
                tensor.record_stream(self._to_device)
            made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            made.record(torch.cuda.current_stream(self._device))
        return made

    @contextmanager
    def leaving(self, mark: torch.cuda.Event) -> Iterator[None]:
        with self._errors(), torch.cuda.stream(self._to_host):
            self._to_host.wait_event(mark)
            yield

    def to_host(self, block: torch.Tensor, source: torch.Tensor) -> CudaCopy:
        return self._copy(self._to_host, block, source)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> CudaCopy:
        return self._copy(self._to_device, target, source)

    def returning(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._to_device)

    def _copy(
        self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor
    ) -> CudaCopy:
        with self._errors(), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            # Who waits for it sleeps, rather than spin.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
        return CudaCopy(done, self._errors)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ReductionError:
            raise
        except RuntimeError as error:  # what torch makes of every error of CUDA
            raise DeviceError(
                f"{self._device} failed: {error}", device=str(self._device)
            ) from error


class CudaCopy:
    """A copy that a stream has been given, by `worker_client.staging.device.Copy`."""

    __slots__ = ("_done", "_errors")

    def __init__(
        self, done: torch.cuda.Event, errors: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._done = done
        self._errors = errors

    def wait(self) -> None:
        with self._errors():
            self._done.synchronize()

    def done(self) -> bool:
        with self._errors():
            return bool(self._done.query())  # type: ignore[no-untyped-call]
