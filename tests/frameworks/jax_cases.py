"""What `worker_client.jax` does, at every rank of a job; started by test_cases."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import worker_client
from reducer.errors import ConfigError, MismatchError
from tests.integration.cases import run_cases
from worker_client.client.bootstrap import connect
from worker_client.jax import all_reduce, broadcast, value_and_grad

client = worker_client.init()
mine = client.rank + 1.0  # 1 and 2: the mean is 1.5
tree = {
    "w": jnp.full((300, 200), mine),
    "b": (jnp.arange(4, dtype=jnp.bfloat16) * mine, jnp.float16(mine)),
    "n": 2 * mine,
}


def check(got):
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert got["b"][0].dtype == jnp.bfloat16
    assert got["b"][1].dtype == jnp.float16
    np.testing.assert_array_equal(got["w"], np.full((300, 200), 1.5))
    np.testing.assert_array_equal(got["b"][0].astype(np.float32), np.arange(4) * 1.5)
    assert (float(got["b"][1]), float(got["n"])) == (1.5, 3.0)


def case_a_tree_is_averaged_eagerly_and_compiled():
    check(all_reduce(tree))
    check(jax.jit(all_reduce)(tree))


def case_large_trees_pass():
    large = [jnp.full((1 << 20,), mine), jnp.full((1 << 22,), mine)]
    for leaf in jax.jit(lambda given: all_reduce(given, "sum"))(large):
        assert set(np.unique(leaf)) == {3.0}


def case_no_leaves_are_no_error():
    assert all_reduce({}) == {}


def case_loops_call_in_order():
    @jax.jit
    def many(x):
        def step(carry, _):
            return all_reduce(carry, "sum"), None

        short, long = all_reduce(jnp.ones(3) * x, "sum"), all_reduce(jnp.ones(5000) * x, "max")
        return jax.lax.scan(step, x, None, length=3)[0] + short[0] + long[0]

    for _ in range(5):
        assert float(many(jnp.float32(mine))) == 12 + 3 + 2


def case_a_compiled_rank_and_an_eager_one_make_the_same_calls():
    def both(x):
        slow = jax.lax.fori_loop(0, 1000, lambda _, y: jnp.sin(y), jnp.ones(5000) * x)
        # Left to itself, a compiled function begins with what is ready.
        return all_reduce(slow, "max")[0] * all_reduce(jnp.ones(3) * x, "sum")[0]

    with jax.disable_jit(client.rank == 1):
        assert float(jax.jit(both)(jnp.float32(mine))) < 1


def case_gradients_are_averaged_and_values_are_not():
    def loss(w, x, y):
        return (w * x).sum() * y, "aux"

    step = value_and_grad(loss, (0, 1), has_aux=True)
    (value, aux), (by_w, by_x) = step(jnp.ones(3), mine, 2.0)
    assert (float(value), aux) == (6 * mine, "aux")
    np.testing.assert_array_equal(by_w, np.full(3, 3.0))
    assert float(by_x) == 6
    plain = jax.jit(value_and_grad(lambda w: (w * mine).sum()))
    np.testing.assert_array_equal(plain(jnp.ones(3))[1], np.full(3, 1.5))


def case_every_rank_gets_the_roots_tree():
    given = {**tree, "flag": jnp.array([client.rank == 1]), "seed": jnp.uint32(client.rank)}
    for got in (broadcast(given, 1), jax.jit(lambda one: broadcast(one, root=1))(given)):
        assert (float(got["n"]), bool(got["flag"][0]), int(got["seed"])) == (4.0, True, 1)
        assert got["seed"].dtype == jnp.uint32
        np.testing.assert_array_equal(got["w"], np.full((300, 200), 2.0))


def case_errors_are_typed_outside_and_named_inside():
    odd = jnp.zeros(3 + client.rank)
    with pytest.raises(MismatchError, match="rank"):
        all_reduce(odd)
    with pytest.raises(jax.errors.JaxRuntimeError, match="MismatchError"):
        jax.block_until_ready(jax.jit(all_reduce)(odd))
    check(jax.jit(all_reduce)(tree))


def case_a_mean_of_integers_is_refused():
    with pytest.raises(ConfigError, match="the mean of int32 is not defined"):
        all_reduce(jnp.arange(3))


def case_a_compiled_function_outlasts_a_client():
    compiled = jax.jit(all_reduce)
    check(compiled(tree))
    worker_client.init().shutdown()
    worker_client.init(job="another")
    check(compiled(tree))


def case_a_client_may_be_given():
    with connect(job="given") as given:
        assert float(all_reduce(jnp.float32(mine), client=given)) == 1.5
        assert given.bytes_reduced == 4


def case_torch_is_not_needed():
    assert "torch" not in sys.modules


if __name__ == "__main__":
    run_cases(globals())
