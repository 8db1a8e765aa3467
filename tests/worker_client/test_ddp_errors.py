"""What a backward pass raises when several of its buckets fail, and what states refuse."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from reducer.errors import ConfigError
from tests.waits import eventually
from tests.worker_client.buckets import Bucket
from worker_client.client import bootstrap

torch = pytest.importorskip("torch", reason="needs torch")


from worker_client.ddp import ReductionState, state_of  # noqa: E402 (it imports torch)

GOOD, BAD, WORSE = torch.float32, torch.complex64, torch.int64  # of the last there is no mean


class Pass(torch.autograd.Function):
    """Brings buckets in its backward pass, some of them in passes that it begins itself."""

    @staticmethod
    def forward(context, x, state, steps):
        context.state, context.steps = state, steps
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        for step in context.steps:
            if isinstance(step, list):
                backward(context.state, step)
            else:
                context.state.reduce(step)
        return gradient, None, None


def backward(state, steps):
    """Make a backward pass that brings buckets: a list among them is of a nested one."""
    backward_of_all([(state, steps)])


def backward_of_all(models):
    """Make one backward pass that brings several models' buckets, the first one's first."""
    x = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        for state, steps in reversed(models):
            x = Pass.apply(x, state, steps)
        x.backward()


def bucket(dtype=GOOD, *, last=False):
    return Bucket(torch.ones(4, dtype=dtype), last)


def test_the_first_error_is_raised(client):
    state = ReductionState(client)
    for first, second, text in ((WORSE, BAD, "mean"), (BAD, WORSE, "complex64")):
        with pytest.raises(ConfigError, match=text):
            backward(state, [bucket(first), bucket(second, last=True)])


@pytest.mark.parametrize(
    "nested",
    [
        lambda first, last: [[first], [last]],
        lambda first, last: [[first], last],
        lambda first, last: [first, [last]],
        lambda first, last: [[first, [last]]],
        lambda first, last: [first, last, []],
    ],
    ids=["each", "first", "last", "both", "none"],
)
def test_a_backward_pass_raises_what_failed_in_nested_ones_when_ddp_is_done(client, nested):
    state = ReductionState(client)
    for first, second in ((BAD, GOOD), (GOOD, BAD)):
        done = client.calls
        with pytest.raises(ConfigError, match="complex64"):
            backward(state, nested(bucket(first), bucket(second, last=True)))
        assert client.calls == done + 2, "DDP's last bucket never came"
        backward(state, nested(bucket(), bucket(last=True)))


def test_an_error_that_another_models_was_raised_before_is_not_raised_a_step_later(client):
    states = [ReductionState(client), ReductionState(client)]
    with pytest.raises(ConfigError, match="complex64"):
        backward_of_all([(state, [bucket(BAD, last=True)]) for state in states])
    for state in states:
        backward(state, [bucket(last=True)])


def test_residuals_of_a_call_in_progress_stay_when_another_models_error_ended_the_pass(
    client, pool
):
    """Rank 1 of two never comes, so rank 0's call goes on."""
    settings = {"servers": pool, "world_size": 2, "job": "residuals", "wire_dtype": "int8"}
    with ThreadPoolExecutor(2) as ranks:
        both = list(ranks.map(lambda rank: bootstrap.connect(rank=rank, **settings), range(2)))
    with both[0] as mine, both[1]:
        net = torch.nn.Linear(64, 64, bias=False)
        first = ReductionState(client)
        second = ReductionState(mine, named_parameters=net.named_parameters())

        def kept():
            (residual,) = second.state_dict()["residuals"].values()
            return float(residual.abs().sum())

        pending = Bucket(torch.linspace(0, 1, 64 * 64), last=True, of=net.weight)
        with pytest.raises(ConfigError, match="complex64"):
            backward_of_all([(first, [bucket(BAD, last=True)]), (second, [bucket(BAD), pending])])
        eventually(lambda: kept() > 0)
        backward(second, [bucket()])
        assert kept() > 0, "the call reads and writes them still"


def test_residuals_are_loaded_by_name_and_in_the_parameters_memory_format(client):
    net = torch.nn.Conv2d(3, 5, 2, bias=False).to(memory_format=torch.channels_last)
    state = ReductionState(client, named_parameters=net.named_parameters())
    assert state.state_dict() == {"residuals": {}}
    kept = torch.arange(60.0).reshape(5, 3, 2, 2)
    state.load_state_dict({"residuals": {"weight": kept}})
    (loaded,) = state.state_dict()["residuals"].values()
    assert loaded.stride() == net.weight.stride() != kept.stride()
    assert torch.equal(loaded, kept)
    assert loaded.data_ptr() != kept.data_ptr()
    state.load_state_dict({"residuals": {}})
    assert state.state_dict() == {"residuals": {}}


@pytest.mark.parametrize(
    ("residuals", "said"),
    [
        ({"weight": torch.zeros(2, 2)}, "'weight' have the shape (2, 2), the parameter has (4, 2)"),
        ({"other": torch.zeros(4, 2)}, "'other', which is no parameter here"),
    ],
    ids=["another shape", "another name"],
)
def test_residuals_of_another_model_are_refused(client, residuals, said):
    net = torch.nn.Linear(2, 4)
    state = ReductionState(client, named_parameters=net.named_parameters())
    with pytest.raises(ConfigError) as error:
        state.load_state_dict({"residuals": residuals})
    assert said in str(error.value)


def test_what_needs_names_or_an_attached_model_is_refused(client):
    with pytest.raises(ConfigError, match="named_parameters="):
        ReductionState(client, exclude=lambda *_: True)
    with pytest.raises(ConfigError, match="attach"):
        state_of(torch.nn.Linear(2, 2))
