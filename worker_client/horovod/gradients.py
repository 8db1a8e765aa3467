"""The gradients of an optimizer on their way: which are complete, and which have started."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from reducer.errors import LocalProtocolError
from worker_client.horovod.bundles import Bundle
from worker_client.horovod.ops import wait_for_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from worker_client.horovod.bundles import Options


class Gradients:
    """All gradients of one optimizer.

    Args:
        named: parameters with their names, in the same order at every rank.
        groups: parameters that travel together; others travel alone.
        options: how they are reduced; None if they are not.
        passes: backward passes until they are complete.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        groups: Sequence[Sequence[torch.Tensor]],
        options: Options | None,
        passes: int,
    ) -> None:
        self._options = options
        self._passes = passes
        self._bundles: list[Bundle] = []
        self._started: list[Bundle] = []
        if options is not None:
            self._prefix = f"optimizer{options.group.optimizers}"  # several may be on their way
            options.group.optimizers += 1
        names = {parameter: name for name, parameter in named}
        grouped = {parameter for group in groups for parameter in group}
        alone = [[parameter] for _, parameter in named if parameter not in grouped]
        for members in (*groups, *alone):
            self.add(names[members[0]], members)

    @property
    def pending(self) -> bool:
        """Whether there was a backward pass, and no `synchronize` since."""
        return any(left < self._passes for bundle in self._bundles for left in bundle.left)

    def add(self, name: str, members: Sequence[torch.Tensor]) -> None:
        """Take on parameters that travel together; those that need no gradient are left out."""
        trained = [parameter for parameter in members if parameter.requires_grad]
        if not trained or self._options is None:
            return
        bundle = Bundle(f"{self._prefix}.{name}", trained, self._options, self._passes)
        self._bundles.append(bundle)
        for at, parameter in enumerate(trained):
            hook = _hook(weakref.ref(self), bundle, at)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def set_passes(self, passes: int) -> None:
        """Set after how many backward passes gradients are complete, from now on."""
        self._passes = passes
        self.reset()

    def reset(self) -> None:
        """Forget what has started and which backward passes there were."""
        self._started = []
        for bundle in self._bundles:
            bundle.handle, bundle.left = None, [self._passes] * len(bundle.left)

    def completed(self, bundle: Bundle, at: int) -> None:
        """Take note that a backward pass has computed one gradient of a bundle.

        Raises:
            LocalProtocolError: it was complete before.
        """
        if bundle.left[at] == 0:
            raise LocalProtocolError(
                "gradients were computed more often than backward_passes_per_step since the last "
                "step(): raise backward_passes_per_step to accumulate more of them"
            )
        bundle.left[at] -= 1
        if not any(bundle.left):
            self._start(bundle)

    def synchronize(self) -> None:
        """Start what has not started, and wait until all gradients are reduced.

        Raises:
            ReductionError: an all-reduce failed; nothing is in progress any more.
        """
        try:
            for bundle in self._bundles:
                if bundle not in self._started and not bundle.frozen:
                    self._start(bundle)
        finally:
            handles = [bundle.handle for bundle in self._started if bundle.handle is not None]
            self.reset()
            wait_for_all(handles)

    def _start(self, bundle: Bundle) -> None:
        self._started.append(bundle)
        bundle.start()


def _hook(to: weakref.ref[Gradients], bundle: Bundle, at: int) -> Callable[[torch.Tensor], None]:
    """Return a parameter's hook, which does nothing once the optimizer is gone."""

    def hook(_: torch.Tensor) -> None:
        gradients = to()
        if gradients is not None:
            gradients.completed(bundle, at)

    return hook
