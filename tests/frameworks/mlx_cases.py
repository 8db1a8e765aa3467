"""What `worker_client.mlx` does, at every rank of a job; started by test_cases."""

import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers

import worker_client
from reducer.errors import ConfigError, MismatchError
from tests.integration.cases import run_cases
from worker_client.client.bootstrap import connect
from worker_client.mlx import all_reduce, average_gradients, broadcast

client = worker_client.init()
mine = client.rank + 1.0  # 1 and 2: the mean is 1.5
tree = {
    "w": mx.full((300, 200), mine),
    "b": (mx.arange(4, dtype=mx.bfloat16) * mine, mx.array(mine, mx.float16)),
    "layers": [{"n": 2 * mine}, {}],
}


def check(got):
    assert (list(got), type(got["b"]), got["layers"][1]) == (list(tree), tuple, {})
    assert (got["b"][0].dtype, got["b"][1].dtype) == (mx.bfloat16, mx.float16)
    np.testing.assert_array_equal(got["w"], np.full((300, 200), 1.5))
    np.testing.assert_array_equal(got["b"][0].astype(mx.float32), np.arange(4) * 1.5)
    assert (got["b"][1].item(), got["layers"][0]["n"].item()) == (1.5, 3.0)


def case_a_tree_is_averaged():
    check(all_reduce(tree))
    check(average_gradients(tree))


def case_what_is_given_stays_as_it_is():
    given = mx.full((5000,), mine)
    lazy = given * 2  # computed when it is needed
    assert (all_reduce([given, lazy], "sum")[1] == 6).all()
    assert (given == mine).all()
    assert (lazy == 2 * mine).all()


def case_views_and_numbers():
    matrix = mx.arange(60_000, dtype=mx.float32).reshape(300, 200) * mine
    transposed, column, rank = all_reduce((matrix.T, matrix[::2, 3], client.rank), "max")
    whole = np.arange(60_000, dtype=np.float32).reshape(300, 200) * 2
    np.testing.assert_array_equal(transposed, whole.T)
    np.testing.assert_array_equal(column, whole[::2, 3])
    assert rank.item() == 1


def case_large_trees_pass():
    large = [mx.full((1 << 20,), mine), mx.full((1 << 22,), mine)]
    for leaf in all_reduce(large, "sum"):
        assert (leaf == 3).all()


def case_float64_keeps_its_bits():
    with mx.stream(mx.cpu):  # which alone has it
        third = mx.array(np.full(3, 1 / 3) * mine, mx.float64)
        got = all_reduce(third, "max")
        assert got.dtype == mx.float64
        assert np.asarray(got).tolist() == [2 / 3] * 3


def case_no_leaves_are_no_error():
    assert all_reduce({}) == {}
    assert broadcast([]) == []


def case_a_model_is_trained_alike():
    mx.random.seed(client.rank)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    model.update(broadcast(model.parameters(), root=1))
    optimizer = optimizers.Adam(0.01)
    step = nn.value_and_grad(model, lambda x: model(x).square().mean())
    for _ in range(5):
        _, gradients = step(mx.random.normal((16, 8)))
        optimizer.update(model, average_gradients(gradients))
    digest = mx.concatenate([model.layers[0].weight.flatten(), model.layers[2].weight.flatten()])
    both = all_reduce({"least": digest, "most": -digest}, "min")
    assert (both["least"] == -both["most"]).all()


def case_every_rank_gets_the_roots_tree():
    flags = {"flag": mx.array([client.rank == 1]), "seed": mx.array(client.rank, mx.uint32)}
    got = broadcast({**tree, **flags}, 1)
    assert (got["layers"][0]["n"].item(), got["flag"].item(), got["seed"].item()) == (4.0, True, 1)
    assert got["seed"].dtype == mx.uint32
    np.testing.assert_array_equal(got["w"], np.full((300, 200), 2.0))


def case_errors_are_typed():
    with pytest.raises(MismatchError, match="rank"):
        all_reduce(mx.zeros(3 + client.rank))
    check(all_reduce(tree))


def case_a_mean_of_integers_is_refused():
    with pytest.raises(ConfigError, match="the mean of int32 is not defined"):
        all_reduce(mx.arange(3))


def case_compiled_functions_cannot_call_the_host():
    with pytest.raises(ValueError, match="compile"):
        mx.compile(all_reduce)(mx.ones(3))
    check(all_reduce(tree))


def case_bfloat16_needs_ml_dtypes():
    installed = sys.modules["ml_dtypes"]
    sys.modules["ml_dtypes"] = None
    try:
        with pytest.raises(ConfigError, match="install it"):
            all_reduce(tree)
    finally:
        sys.modules["ml_dtypes"] = installed
    check(all_reduce(tree))


def case_a_client_may_be_given():
    with connect(job="given") as given:
        assert all_reduce(mx.array(mine), client=given).item() == 1.5
        assert given.bytes_reduced == 4


def case_torch_is_not_needed():
    assert "torch" not in sys.modules


if __name__ == "__main__":
    run_cases(globals())
