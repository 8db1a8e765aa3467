"""What `worker_client.keras` does, at every rank of a job; started by test_cases."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import worker_client
from reducer.errors import ConfigError
from tests.integration.cases import run_cases
from worker_client.client.bootstrap import connect
from worker_client.keras import (
    BroadcastGlobalVariablesCallback,
    DistributedOptimizer,
    MetricAverageCallback,
)

client = worker_client.init()
mine = client.rank + 1.0  # 1 and 2: the mean is 1.5
x, y = np.full((4, 1), mine, np.float32), np.zeros((4, 1), np.float32)


def line(start, **dense):
    """A model of one weight, whose loss below has the gradient x."""
    fill = keras.initializers.Constant(start)
    return keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer=fill, **dense)]
    )


def slope(_, predicted):
    return keras.ops.mean(predicted)


def case_gradients_are_averaged_in_fit_and_outside():
    for eagerly in (False, True):
        model = line(5.0)
        model.compile(DistributedOptimizer(keras.optimizers.SGD(1.0)), slope, run_eagerly=eagerly)
        model.fit(x, y, batch_size=2, verbose=0)
        assert model.get_weights()[0].item() == 5 - 2 * 1.5
    weight = keras.Variable(5.0)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    tf.function(lambda: optimizer.apply([tf.constant(mine)], [weight]))()
    optimizer.apply_gradients([(tf.constant(mine), weight)])
    assert float(weight) == 5 - 2 * 1.5


def case_an_optimizer_keeps_its_state_and_saves_as_itself():
    model = line(5.0)
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    model.compile(optimizer, slope)
    model.fit(np.ones_like(x), y, batch_size=4, verbose=0)
    assert DistributedOptimizer(optimizer) is optimizer
    model.compile(optimizer, slope)
    model.fit(x, y, batch_size=4, verbose=0)
    assert model.get_weights()[0].item() == 5 - 1 - (0.5 * 1 + 1.5)
    with tempfile.TemporaryDirectory() as home:
        path, weights = Path(home) / "model.keras", Path(home) / "model.weights.h5"
        model.save(path)
        model.save_weights(weights)
        resumed = line(0.0)
        resumed.compile(DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)), slope)
        resumed.optimizer.build(resumed.trainable_variables)
        resumed.load_weights(weights)
        loaded = keras.models.load_model(path, custom_objects={"slope": slope})
    resumed.fit(x, y, batch_size=4, verbose=0)
    assert resumed.get_weights()[0].item() == 2 - (0.5 * 2 + 1.5)
    assert type(loaded.optimizer) is keras.optimizers.SGD
    assert int(loaded.optimizer.iterations) == 2
    loaded.fit(x, y, batch_size=4, verbose=0)  # without the other rank
    assert loaded.get_weights()[0].item() == 2 - (0.5 * 2 + mine)


def case_training_begins_with_the_roots_variables():
    model = line(mine)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(mine, momentum=0.5))
    model.compile(optimizer, slope)
    model.fit(x, y, 4, callbacks=[BroadcastGlobalVariablesCallback(1)], verbose=0)
    assert model.get_weights()[0].item() == 2 - 2 * 1.5
    assert float(optimizer.learning_rate) == 2


def case_metrics_are_averaged():
    model = line(1.0)
    model.compile("sgd", slope, metrics=["mae"])
    seen = []
    after = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(dict(logs)))
    callbacks = [MetricAverageCallback(), after]
    history = model.fit(x, y, verbose=0, callbacks=callbacks, validation_data=(2 * x, y)).history
    assert history["loss"] == [1.5]
    assert (seen[0]["loss"], seen[0]["mae"]) == (1.5, 1.5)
    assert seen[0]["val_loss"] == history["val_loss"][0]
    values = np.array([history["val_loss"][0]])
    assert client.all_reduce(values).wait() == history["val_loss"]


def case_an_infinite_gradient_at_one_rank_skips_the_step_at_all():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1.0)
    optimizer = DistributedOptimizer(scaled)
    weight = keras.Variable(5.0)
    optimizer.apply([tf.constant(np.inf if client.rank else 1.0, tf.float32)], [weight])
    assert float(weight) == 5
    optimizer.apply([tf.constant(mine)], [weight])
    assert float(weight) == 5 - 1.5 / 0.5  # the scale was halved


def case_loss_scaling_outside_is_refused():
    model = line(5.0, dtype="mixed_float16")
    inside = DistributedOptimizer(keras.optimizers.SGD(1.0))
    model.compile(keras.optimizers.LossScaleOptimizer(inside), slope)
    with pytest.raises(ConfigError, match=r"DistributedOptimizer.*LossScaleOptimizer"):
        model.fit(x, y, callbacks=[BroadcastGlobalVariablesCallback()], verbose=0)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(ConfigError, match=r"DistributedOptimizer.*LossScaleOptimizer"):
            DistributedOptimizer(keras.optimizers.SGD(1.0))
    finally:
        keras.config.set_dtype_policy("float32")


def case_what_cannot_be_served_is_refused():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ConfigError, match="already"):
        DistributedOptimizer(optimizer)
    with pytest.raises(ConfigError, match="got str"):
        DistributedOptimizer("sgd")
    model = line(5.0)
    model.compile(optimizer, slope, jit_compile=True)
    with pytest.raises(ConfigError, match="set jit_compile=False"):
        model.fit(x, y, verbose=0)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(keras.optimizers.SGD(1.0)), slope)
    with pytest.raises(ConfigError, match="no weights yet"):
        model.fit(x, y, callbacks=[BroadcastGlobalVariablesCallback()], verbose=0)


def case_a_rank_that_leaves_ends_fit_with_its_name():
    with connect(job="leaves") as given:
        model = line(5.0)
        model.compile(DistributedOptimizer(keras.optimizers.SGD(1.0), client=given), slope)
        if client.rank == 0:
            with pytest.raises(tf.errors.UnknownError, match=r"RankLostError: .*rank 1"):
                model.fit(x, y, epochs=3, verbose=0)
        else:
            model.fit(x, y, epochs=2, verbose=0)


if __name__ == "__main__":
    run_cases(globals())
