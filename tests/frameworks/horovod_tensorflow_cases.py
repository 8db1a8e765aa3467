"""What `worker_client.horovod.tensorflow` and its Keras do, at both ranks of a job."""

import contextlib
import io
import pickle
import runpy
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import worker_client.horovod.keras as of_keras
import worker_client.horovod.tensorflow as hvd
import worker_client.horovod.tensorflow.keras as of_tensorflow
from reducer.errors import ConfigError, MismatchError
from tests.horovod_imports import changed
from tests.integration import horovod_calls
from tests.integration.cases import run_cases
from worker_client.horovod.tensorflow.host import HOST

hvd.init()
rank, mine = hvd.rank(), hvd.rank() + 1.0  # 1 and 2: the mean is 1.5


def everywhere(function):
    """What a function returns eagerly and in a graph."""
    return [function(), tf.function(function)()]


SCRIPT = """
import horovod
import horovod.keras as of_keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras
from horovod.keras.callbacks import MetricAverageCallback
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.elastic import TensorFlowState
from horovod.tensorflow.functions import broadcast_object, broadcast_variables
from horovod.tensorflow.keras import callbacks, elastic
from horovod.tensorflow.keras.callbacks import LearningRateWarmupCallback
from horovod.tensorflow.keras.elastic import KerasState
from horovod.tensorflow.mpi_ops import allreduce, rank, size

same = [
    (horovod.tensorflow, hvd),
    (hvd.allreduce, allreduce),
    (of_keras.DistributedOptimizer, horovod.tensorflow.keras.DistributedOptimizer),
    (of_keras.callbacks.MetricAverageCallback, callbacks.MetricAverageCallback),
    (elastic.run, hvd.elastic.run),
    (horovod.rank, rank),
]
"""


def case_the_pages_command_changes_every_import():
    with tempfile.TemporaryDirectory() as folder:
        changed(SCRIPT, Path(folder))
        found = runpy.run_path(str(Path(folder, "train.py")))
    assert all(one is other for one, other in found["same"])


def tensor_of(elements, dtype="float32"):
    return tf.cast(tf.constant(elements), dtype)


def result_of(tensor):
    return horovod_calls.Result(tensor.numpy().tolist(), tensor.dtype.name)


def case_calls():
    given = (hvd, tensor_of, [0, 1], rank)
    calls = [*horovod_calls.reductions(*given), *horovod_calls.exchanges(*given)]
    calls += horovod_calls.compressions(hvd, tensor_of)
    horovod_calls.check(calls, result_of)
    for name, call, expected in calls:
        graph = tf.function(lambda call=call: call())
        horovod_calls.check([(f"{name}, in a graph", graph, expected)], result_of)


def case_gradients_pass_through_calls():
    for name, call, given, factors, expected in horovod_calls.gradients(
        hvd, tensor_of, [0, 1], rank
    ):
        x = tf.Variable(given)

        def gradient(x=x, call=call, factors=factors):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(call(x) * factors)
            return tape.gradient(loss, x)

        for got in everywhere(gradient):
            assert got.numpy().tolist() == expected, name
    x = tf.Variable(1.0)
    with (
        pytest.raises(ConfigError, match="gradient of Max is not defined"),
        tf.GradientTape() as tape,
    ):
        tape.gradient(hvd.allreduce(x, op=hvd.Max), x)


def case_arguments_and_refusals():
    variable = hvd.allreduce(tf.Variable(mine), op=hvd.Sum)
    assert (variable.dtype, float(variable)) == (tf.float32, 3.0)
    for message, call in (
        ("one dimension or more", lambda: hvd.allgather(tf.constant(1.0))),
        ("use numbers", lambda: hvd.broadcast(tf.constant("text"), 0)),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def case_the_root_has_it():
    variables = [tf.Variable([mine]), keras.Variable(rank, dtype="int32")]
    hvd.broadcast_variables(variables, root_rank=1, inplace=True)
    assert (float(variables[0][0]), int(variables[1])) == (2.0, 1)
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == [0, 1]
    assert hvd.broadcast_object_fn(root_rank=1)(rank) == 1
    with pytest.raises(RuntimeError, match=r"model\.variables"):
        hvd.broadcast_global_variables(0)


def case_numbers_are_found_when_a_graph_runs():
    for got in everywhere(lambda: [hvd.size_op(), hvd.rank_op(), hvd.local_size_op()]):
        assert [int(one) for one in got] == [2, rank, 2]
    for got in everywhere(lambda: [hvd.local_rank_op(), hvd.process_set_included_op()]):
        assert [int(one) for one in got] == [rank, 1]


def case_process_sets():
    alone = hvd.add_process_set([1])
    if rank:
        assert float(hvd.allreduce(tf.constant(mine), op=hvd.Sum, process_set=alone)) == 2.0
    assert int(hvd.process_set_included_op(alone.process_set_id)) == rank
    w = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = w * mine
    tape = hvd.DistributedGradientTape(tape, process_set=alone)
    assert float(tape.gradient(loss, [w])[0]) == mine
    assert hvd.remove_process_set(alone)


def case_tapes():
    weight, unused, table = tf.Variable(tf.ones(3)), tf.Variable(1.0), tf.Variable(tf.ones((2, 2)))
    own = tf.Variable(1.0)

    def gradients(**options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * mine) + own * mine
            loss += tf.reduce_sum(tf.gather(table, [rank])) * mine
        tape = hvd.DistributedGradientTape(tape, **options)
        tape.register_local_source(own)
        return tape.gradient(loss, [weight, unused, table, own])

    for got in everywhere(gradients):
        np.testing.assert_array_equal(got[0], [1.5] * 3)
        assert got[1] is None
        assert isinstance(got[2], tf.IndexedSlices)
        np.testing.assert_array_equal(tf.convert_to_tensor(got[2]), [[0.5, 0.5], [1.0, 1.0]])
        assert float(got[3]) == mine / 2
    got = gradients(
        sparse_as_dense=True,
        compression=hvd.Compression.fp16,
        op=hvd.Average,
        gradient_predivide_factor=2.0,
        scale_local_gradients=False,
        groups=2,
    )
    assert tf.is_tensor(got[2])
    assert (float(got[0][0]), got[2].numpy().tolist()) == (1.5, [[0.5, 0.5], [1.0, 1.0]])
    assert float(got[3]) == mine
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    layer.build((1, 1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.fill((1, 1), mine))) + weight[0] * mine
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    local, shared = tape.get_local_and_global_gradients(loss, [*layer.trainable_weights, weight])
    assert [source for source, _ in local] == layer.trainable_weights
    assert float(local[0][1][0, 0]) == mine / 2
    assert [float(gradient[0]) for _, gradient in shared] == [1.5]
    with pytest.raises(ConfigError, match="gradient_predivide_factor"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)


def case_ranks_that_disagree_hear_why():
    for kind in (hvd.HorovodInternalError, MismatchError, tf.errors.FailedPreconditionError):
        with pytest.raises(kind, match=r"rank 0 says .*rank 1") as caught:
            hvd.allreduce(tf.ones(2 + rank), name="sizes")
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 (this test's own)
    assert (type(again), again.field) == (MismatchError, "total_bytes")
    longer = type(caught.value)(None, None, "a layer's words", caught.value.error_code)  # as Keras
    assert isinstance(longer, MismatchError)
    assert isinstance(longer, tf.errors.FailedPreconditionError)
    assert (str(longer), longer.field, longer.error_code) == ("a layer's words", "total_bytes", 9)
    with pytest.raises(tf.errors.InvalidArgumentError, match="one dimension or more"):
        hvd.allgather(tf.constant(1.0))
    with pytest.raises(tf.errors.UnknownError, match=r"MismatchError.*rank 0 says"):
        tf.function(lambda: hvd.allreduce(tf.ones(2 + rank), name="sizes"))()
    assert float(hvd.allreduce(tf.constant(mine), name="sizes")) == 1.5


def model_of(rate, **options):
    """Return a compiled model of one weight, 1 at both ranks, and its optimizer."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.ones((1, 1), np.float32)])
    optimizer = of_keras.DistributedOptimizer(keras.optimizers.SGD(rate), **options)
    # The gradient of a batch of ones is 2 * (weight - target): at a weight of 1, 2 and 4.
    model.compile(optimizer=optimizer, loss="mse")
    return model, optimizer


def weight_of(model):
    """Return the model's only weight."""
    return float(model.get_weights()[0].item())


def fit(model, steps, **options):
    x, y = np.ones((steps, 1), np.float32), np.full((steps, 1), -rank, np.float32)
    return model.fit(x, y, batch_size=1, shuffle=False, verbose=0, **options)


def case_optimizers():
    model, optimizer = model_of(0.5)
    assert type(optimizer).__name__ == "SGD"
    fit(model, 1)
    assert weight_of(model) == 1.0 - 0.5 * 3.0
    model, _ = model_of(0.5, op=hvd.Sum, compression=hvd.Compression.fp16)
    fit(model, 1)
    assert weight_of(model) == 1.0 - 0.5 * 6.0
    for averaged, gradient in ((False, 6.0), (True, 3.0)):
        options = {"backward_passes_per_step": 2, "average_aggregated_gradients": averaged}
        model, _ = model_of(0.5, **options)
        fit(model, 3)  # the third waits for a fourth
        assert weight_of(model) == 1.0 - 0.5 * gradient
    model, optimizer = model_of(0.5)
    optimizer.register_local_var(model.trainable_weights[0])
    fit(model, 1)
    assert weight_of(model) == 1.0 - 0.5 * (1.0 + rank)
    with pytest.raises(ConfigError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ConfigError, match="before the model is compiled"):
        of_keras.DistributedOptimizer(_built(), backward_passes_per_step=2)
    layer = keras.layers.Dense(1)
    layer.build((1, 1))
    partial = of_keras.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[layer])
    before = layer.kernel.numpy()
    partial.apply([tf.fill((1, 1), mine)], [layer.kernel])
    np.testing.assert_allclose(layer.kernel.numpy(), before - mine / 2)


def _built():
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable(1.0)])
    return optimizer


def case_callbacks():
    model, optimizer = model_of(1.0)
    model.set_weights([np.full((1, 1), mine, np.float32)])
    rates = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: rates.append(float(optimizer.learning_rate))
    )
    callbacks = [
        of_tensorflow.callbacks.BroadcastGlobalVariablesCallback(1),
        of_tensorflow.callbacks.MetricAverageCallback(),
        of_tensorflow.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2, verbose=1),
        of_tensorflow.callbacks.LearningRateScheduleCallback(0.5, 0.1, start_epoch=2, end_epoch=4),
        of_tensorflow.callbacks.LearningRateScheduleCallback(
            0.5, lambda epoch: epoch, start_epoch=4, staircase=False, momentum_correction=False
        ),
        seen,
    ]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        history = fit(model, 2, epochs=5, callbacks=callbacks).history
    assert ("Epoch 2: the learning rate is 0.5." in said.getvalue()) == (rank == 0)
    # From 0.5 / 2 to 0.5 in four batches; 0.1 to the power of 0 and 1; the epoch and its half.
    warm = [0.5 * (1 + at / 4) / 2 for at in (1, 2, 3, 4)]
    np.testing.assert_allclose(rates, [*warm, 0.5, 0.5, 0.05, 0.05, 2.0, 2.25], rtol=1e-6)
    np.testing.assert_allclose(history["lr"], [warm[1], warm[3], 0.5, 0.05, 2.25], rtol=1e-6)
    assert len(set(hvd.allgather_object(history["loss"][0]))) == 1
    assert len(set(hvd.allgather_object(weight_of(model)))) == 1


def case_an_unbuilt_model_and_local_variables_are_broadcast_as_asked():
    weight = keras.initializers.Constant(mine)
    late = keras.Sequential([keras.layers.Dense(1, kernel_initializer=weight)])
    late.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    fit(late, 2, callbacks=[of_keras.callbacks.BroadcastGlobalVariablesCallback(1)])
    assert weight_of(late) == 2.0
    model, _ = model_of(0.0)
    model.set_weights([np.full((1, 1), mine, np.float32)])
    local = model.weights
    options = {"root_rank": 1, "local_variables": local}
    fit(model, 1, callbacks=[of_keras.callbacks.BroadcastGlobalVariablesCallback(**options)])
    assert weight_of(model) == mine


def case_a_loaded_model_reduces():
    model, _ = model_of(0.5)
    fit(model, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        loaded = of_keras.load_model(path)
        plain = keras.models.load_model(path)
    assert int(loaded.optimizer.iterations) == 1
    assert type(plain.optimizer) is keras.optimizers.SGD
    loaded.set_weights([np.ones((1, 1), np.float32)])
    fit(loaded, 1)
    assert weight_of(loaded) == 1.0 - 0.5 * 3.0


def case_calls_of_keras():
    assert float(of_keras.allreduce(mine)) == 1.5
    assert of_keras.allgather([rank]).numpy().tolist() == [0, 1]
    assert float(of_keras.broadcast(mine, 1)) == 2.0
    assert of_keras.reducescatter([mine, mine], op=hvd.Sum).numpy().tolist() == [3.0]


def case_elastic_states():
    model, optimizer = model_of(0.5)
    model.set_weights([np.full((1, 1), mine, np.float32)])
    state = of_keras.elastic.KerasState(model, epoch=rank, batch=7)
    state.sync()
    assert (weight_of(model), state.epoch) == (1.0, 0)
    variable = tf.Variable(mine)
    other = hvd.elastic.TensorFlowState([variable], seen=[])
    failed = []

    @hvd.elastic.run
    def train(state):
        variable.assign_add(1.0)
        state.seen.append(len(failed))
        if not failed:
            failed.append(1)
            tf.function(lambda: HOST.call(fail, [tf.constant(0.0)], [()]))()
        state.save()
        return float(variable)

    def fail(_):
        raise hvd.HorovodInternalError("on purpose")

    assert train(other) == 2.0  # rank 0's, as it was before the failure, and one more
    assert other.seen == [1]
    fit(
        model,
        2,
        epochs=2,
        callbacks=[
            of_keras.elastic.CommitStateCallback(state, 2),
            of_keras.elastic.UpdateBatchStateCallback(state),
            of_keras.elastic.UpdateEpochStateCallback(state),
        ],
    )
    assert (state.epoch, state.batch) == (2, 0)
    committed = weight_of(model)
    model.set_weights([np.full((1, 1), 9.0, np.float32)])
    iterations = int(optimizer.iterations)
    optimizer.iterations.assign(0)
    state.restore()
    assert (weight_of(model), int(optimizer.iterations)) == (committed, iterations)


def case_every_joined_rank_is_waited_for():
    if rank == 0:
        assert float(hvd.allreduce(tf.constant(4.0), name="more")) == 2.0  # of 4 and 0
    assert hvd.join() == 0


if __name__ == "__main__":
    run_cases(globals())
