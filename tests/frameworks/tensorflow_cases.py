"""What `worker_client.tensorflow` does, at every rank of a job; started by test_cases."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import worker_client
from reducer.errors import ConfigError, MismatchError, RankLostError
from tests.integration.cases import run_cases
from worker_client.client.bootstrap import connect
from worker_client.tensorflow import DistributedGradientTape, all_reduce, broadcast_variables

# Two devices on the CPU, for a strategy with two replicas.
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

client = worker_client.init()
mine = client.rank + 1.0  # 1 and 2: the mean is 1.5


def everywhere(function):
    """What a function returns eagerly and in a graph."""
    return [function(), tf.function(function)()]


def case_tensors_of_all_types_are_averaged():
    def average():
        return all_reduce(
            {
                "w": tf.fill((300, 200), mine),
                "b": [tf.constant([mine, 0], tf.bfloat16), tf.constant(mine, tf.float16), None],
                "n": tf.constant(mine, tf.float64),
            }
        )

    for got in everywhere(average):
        np.testing.assert_array_equal(got["w"], np.full((300, 200), 1.5, np.float32))
        np.testing.assert_array_equal(tf.cast(got["b"][0], tf.float32), [1.5, 0])
        assert (got["b"][1].dtype, got["b"][2]) == (tf.float16, None)
        assert (float(got["b"][1]), float(got["n"])) == (1.5, 1.5)


def case_shapes_are_known_in_graphs():
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((None, 3))])
    def average(x):
        shapes.append(all_reduce(x).shape.as_list())
        return x

    average(tf.ones((2, 3)))
    assert shapes == [[None, 3]]


def case_gradients_are_averaged():
    weight = tf.Variable(tf.ones(3))
    unused = tf.Variable(1.0)

    def gradients():
        with DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(weight * mine)
        return tape.gradient(loss, [weight, unused])

    def wrapped_later():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * mine)
        later = DistributedGradientTape(tape, op="sum")
        assert later.watched_variables() == (weight,)
        return later.gradient(loss, [weight], output_gradients=tf.constant(0.5))

    for got in everywhere(gradients):
        np.testing.assert_array_equal(got[0], [1.5] * 3)
        assert got[1] is None
    for got in everywhere(wrapped_later):
        np.testing.assert_array_equal(got[0], [1.5] * 3)


def case_sparse_gradients_become_dense():
    table = tf.Variable(tf.zeros((5, 2)))

    def gradients():
        with DistributedGradientTape(tf.GradientTape()) as tape:
            rows = tf.gather(table, [3, client.rank, 3])
        return tape.gradient(rows, table)

    for got in everywhere(gradients):
        np.testing.assert_array_equal(got[:, 0], [0.5, 0.5, 0, 2, 0])


def case_a_graph_and_an_eager_rank_make_the_same_calls():
    @tf.function
    def both():
        slow = tf.ones(5000) * mine
        for _ in tf.range(200):
            slow = tf.sin(slow)
        # Left to itself, a graph begins with what is ready.
        product = all_reduce(slow, "max")[0] * all_reduce(tf.ones(3) * mine, "sum")[0]
        for count in tf.range(1, 4):
            product *= all_reduce(tf.ones(count) * mine, "sum")[0]
        return product

    tf.config.run_functions_eagerly(client.rank == 1)
    try:
        assert 0 < float(both()) < 3**4
    finally:
        tf.config.run_functions_eagerly(False)


def case_variables_are_broadcast():
    def variables():
        return [
            tf.Variable(tf.fill((30, 7), mine)),
            tf.Variable(client.rank == 1),
            tf.Variable(tf.constant(client.rank, tf.uint32)),
        ]

    ours, in_graph = variables(), variables()
    broadcast_variables(ours, 1)
    tf.function(lambda: broadcast_variables(in_graph, root=1))()
    for weight, flag, seed in (ours, in_graph):
        np.testing.assert_array_equal(weight, np.full((30, 7), 2.0))
        assert (bool(flag), int(seed)) == (True, 1)
    with pytest.raises(ConfigError, match="strings"):
        broadcast_variables([tf.Variable("a")])


def case_errors_are_typed_eagerly_and_named_in_graphs():
    odd = tf.zeros(3 + client.rank)
    with pytest.raises(MismatchError, match="rank"):
        all_reduce(odd)
    with pytest.raises(tf.errors.UnknownError, match="MismatchError: "):
        tf.function(all_reduce)(odd)
    assert float(all_reduce(mine)) == 1.5


def case_a_lost_rank_is_named():
    with connect(job="lost") as given:
        assert float(all_reduce(mine, client=given)) == 1.5
        if client.rank == 0:
            with pytest.raises(RankLostError, match="rank 1"):
                all_reduce(mine, client=given)


def case_xla_is_refused():
    compiled = tf.function(lambda: all_reduce(mine), jit_compile=True, autograph=False)
    with pytest.raises(ConfigError, match="set jit_compile=False"):
        compiled()


def case_several_replicas_are_refused():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope(), pytest.raises(ConfigError, match="leave the strategy out"):
        all_reduce(tf.constant(mine))


def case_a_graph_outlasts_a_client():
    average = tf.function(lambda: all_reduce(tf.constant(mine)))
    assert float(average()) == 1.5
    worker_client.init().shutdown()
    worker_client.init(job="another")
    assert float(average()) == 1.5


def case_torch_is_not_needed():
    assert "torch" not in sys.modules


if __name__ == "__main__":
    run_cases(globals())
