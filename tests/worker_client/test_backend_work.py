"""A handle of the backend whose future an exception out of a signal handler has interrupted."""

from concurrent.futures import Future

import pytest

from tests.waits import eventually

pytest.importorskip("torch", reason="needs torch")

import torch

from worker_client.torch_backend.work import ReductionWork


class _Part:
    """An all-reduce; the handler runs as it is asked for its future, so many times."""

    def __init__(self, interrupts):
        self.told = Future()
        self.interrupts = interrupts

    def done(self):
        return self.told.done()

    def wait(self, timeout_s=None):
        self.told.result(timeout_s)

    def future(self):
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return self.told


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda work: work.wait(), id="wait"),
        pytest.param(lambda work: work.get_future().wait(), id="future"),
        pytest.param(lambda work: eventually(work.is_completed), id="is_completed"),
    ],
)
@pytest.mark.parametrize("interrupts", [(0, 1), (1, 0)], ids=["last", "first"])
@pytest.mark.parametrize("early", [False, True], ids=["later", "at once"])
def test_a_future_whose_making_was_interrupted_ends(ask, interrupts, early):
    parts = [_Part(times) for times in interrupts]
    begun = []
    work = ReductionWork(parts, [torch.ones(1)], begin=lambda: begun.append(1))
    with pytest.raises(KeyboardInterrupt):
        work.get_future()
    told = work.get_future().then(lambda _: len(begun)) if early else None
    for part in parts:
        part.told.set_result(None)
    ask(work)
    assert told is None or told.wait() == 1
    assert len(begun) <= 1
