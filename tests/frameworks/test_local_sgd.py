"""Local SGD of several libraries, as docs/frameworks.md has it: through reducers and over Gloo."""

import pytest

from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")

pytestmark = pytest.mark.timeout(300)
STEPS = range(1, 19)


def train(case, ranks, servers=(), **more):
    settings = {"REDUCTION_JOB": case, "ACCELERATE_USE_CPU": "1", "TQDM_DISABLE": "1", **more}
    return run(
        environments(ranks, servers, **settings), "-m", "tests.frameworks.local_sgd_cases", case
    )


# How many times the size of the model has gone through reducers after so many steps.


def periods_from_the_first_step(steps):
    return (steps + 3) // 4


def gradients_then_periods(steps):
    return min(steps, 4) + max(0, steps - 1) // 4


def whole_periods(steps):
    return steps // 4


@pytest.mark.parametrize(
    ("case", "package", "sent", "after"),
    [
        ("averager", "torch", periods_from_the_first_step, 0),
        ("accelerated", "accelerate", whole_periods, 1),
        ("lightning", "lightning", gradients_then_periods, 0),
    ],
)
def test_two_ranks_get_the_bits_that_they_get_over_gloo_with_fewer_bytes(
    case, package, sent, after, servers
):
    pytest.importorskip(package, reason=f"needs {package}")
    for ours, stock in zip(train(case, 2, servers), train(case, 2), strict=True):
        assert ours["weights"] == stock["weights"]  # a sum of two does not depend on their order
        assert ours["counted"] == [sent(steps) * ours["bytes"] for steps in STEPS]
        assert ours["total"] == ours["counted"][-1] + after * ours["bytes"]
        assert stock["total"] == 0


def test_post_local_sgd_over_the_backend_and_with_a_client(servers):
    backend, attached = (train(c, 4, servers) for c in ("post_local", "post_local_attached"))
    for rank, other, gloo in zip(backend, attached, train("post_local", 4), strict=True):
        assert rank["weights"] == pytest.approx(gloo["weights"], rel=1e-4, abs=1e-5)
        assert rank["weights"] == other["weights"]
        assert gloo["total"] == 0
        expected = [gradients_then_periods(steps) * rank["bytes"] for steps in STEPS]
        assert rank["counted"] == other["counted"] == expected


def test_fragments_of_a_model_are_on_their_way_while_others_train(servers):
    coordination = pytest.importorskip("torchft.coordination", reason="needs torchft")
    trained = []
    for there in (servers, []):
        lighthouse = coordination.LighthouseServer(
            bind="[::]:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=2000
        )
        try:
            trained.append(train("streaming", 2, there, TORCHFT_LIGHTHOUSE=lighthouse.address()))
        finally:
            lighthouse.shutdown()
    for ours, stock in zip(*trained, strict=True):
        assert ours["weights"] == stock["weights"]
        first, second = (8 * 16 + 16) * 4, (16 + 1) * 4  # bytes of the two fragments, in turn
        whole = first + second
        assert ours["counted"][3::4] == [first, whole, whole + first, 2 * whole]
        assert stock["total"] == 0
