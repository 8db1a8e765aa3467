"""Settings of the worker: where they come from, and what is refused."""

import inspect
import json
import math
import re
from ast import literal_eval
from pathlib import Path

import pytest

import worker_client
from reducer import config as reducer_config
from reducer.errors import ConfigError
from tests.worker_client.transcripts import scenarios
from worker_client import config
from worker_client.client import bootstrap

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("no_settings")


DEFAULTS, WAYS, MISTAKES = {}, [], []
for title, lines in scenarios("settings.txt").items():
    name, _, default = title.partition(" = ")
    DEFAULTS[name] = literal_eval(default)
    for text, _, meant in (line.partition(" -> ") for line in lines.splitlines()):
        given, (_, is_mistake, why) = literal_eval(text.strip()), meant.partition("error:")
        if is_mistake:
            MISTAKES.append((name, given, why.strip()))
        else:
            value = literal_eval(meant)
            is_path = name in {"keys", "timeline", "dump", "libpython"}
            WAYS.append((name, given, Path(value) if is_path else value))


def test_every_setting_is_covered():
    assert set(config.WorkerConfig.model_fields) == set(DEFAULTS) == {name for name, *_ in WAYS}


def test_defaults():
    assert config.load().model_dump() == DEFAULTS
    assert config.load(**dict.fromkeys(DEFAULTS)).model_dump() == DEFAULTS  # None: not given


def test_empty_names_of_servers_and_keys_are_none(monkeypatch):
    monkeypatch.setenv("REDUCTION_SERVERS", " ")
    monkeypatch.setenv("REDUCTION_KEYS", " ")
    assert config.load().model_dump() == DEFAULTS


@pytest.mark.parametrize(("name", "given", "value"), WAYS)
def test_from_an_argument_and_from_the_environment(monkeypatch, name, given, value):
    expected = DEFAULTS | {name: pytest.approx(value)}
    assert config.load(**{name: given}).model_dump() == expected
    if isinstance(given, str):
        monkeypatch.setenv(f"REDUCTION_{name.upper()}", given)
        assert config.load().model_dump() == expected


@pytest.mark.parametrize(
    ("name", "argument", "environment"),
    [
        ("servers", (), "b:2"),
        ("chunk_bytes", 0, "64KiB"),
        ("connect_timeout", 5.0, "rubbish"),  # which nobody needs
    ],
)
def test_an_argument_beats_the_environment(monkeypatch, name, argument, environment):
    monkeypatch.setenv(f"REDUCTION_{name.upper()}", environment)
    assert getattr(config.load(**{name: argument}), name) == argument


@pytest.mark.parametrize(("name", "given", "why"), [*MISTAKES, ("timeout", math.nan, "")])
def test_a_mistake_is_named(monkeypatch, name, given, why):
    variable = f"REDUCTION_{name.upper()}"
    with pytest.raises(ConfigError, match=f"^{variable}: .*{why}.*got ") as of_argument:
        config.load(**{name: given})
    if isinstance(given, str):
        monkeypatch.setenv(variable, given)
        with pytest.raises(ConfigError) as of_environment:
            config.load()
        assert str(of_environment.value) == str(of_argument.value)


def test_every_mistake_is_told():
    said = r"REDUCTION_JOB: .*; REDUCTION_TIMEOUT: .*; REDUCTION_SERVER: Extra inputs"
    with pytest.raises(ConfigError, match=said):
        config.load(job="x" * 200, timeout="soon", server="a:1")


@pytest.mark.parametrize("function", [worker_client.init, bootstrap.connect])
def test_an_unknown_argument_of_init_is_refused_as_python_does(function):
    unknown = rf"^{function.__name__}\(\) got an unexpected keyword argument "
    with pytest.raises(TypeError, match=rf"{unknown}'server'. Did you mean 'servers'\?$"):
        function(server="a:1", rank=0, world_size=1)
    with pytest.raises(TypeError, match=rf"{unknown}'fallback'$"):
        function(fallback="process-group")
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        function("a:1")


def test_init_describes_its_arguments():
    section = inspect.cleandoc(worker_client.init.__doc__ or "").partition("\nArgs:\n")[2]
    described = re.findall(r"^    (\w+): ", section.partition("\n\n")[0], re.MULTILINE)
    assert described == list(config.InitSettings.__annotations__)
    assert set(described) - {"rank", "world_size"} <= set(config.WorkerConfig.model_fields)


def test_a_reducers_settings_are_known(monkeypatch):
    assert set(config.REDUCER_SETTINGS) == set(reducer_config.ReducerConfig.model_fields)
    assert set(reducer_config.WORKER_SETTINGS) == DEFAULTS.keys() - set(config.REDUCER_SETTINGS)
    for name in set(config.REDUCER_SETTINGS) - set(DEFAULTS):  # those that both read, both judge
        monkeypatch.setenv(f"REDUCTION_{name.upper()}", "not for the worker to judge")
    assert config.load().model_dump() == DEFAULTS


def test_the_restart_count_is_the_generation(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert config.load().generation == 2
    assert config.load(generation=0).generation == 0
    monkeypatch.setenv("REDUCTION_GENERATION", "7")
    assert config.load().generation == 7
    assert config.load(generation=1).generation == 1


def test_reducers_that_a_launcher_names_are_used_unless_others_are_given(monkeypatch):
    cluster = {"worker": ["a:1", "b:1"], "ps": ["c:1", "d:1"]}
    spec = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(spec))
    assert config.load().servers == ("c:5555", "d:5555")
    assert config.load(servers="e:1").servers == ("e:1",)
    monkeypatch.setenv("REDUCTION_BIND", "tcp://0.0.0.0:7000")
    assert config.load().servers == ("c:7000", "d:7000")
    monkeypatch.setenv("REDUCTION_SERVERS", "f:1")
    assert config.load().servers == ("f:1",)
    monkeypatch.setenv("REDUCTION_SERVERS", "")
    assert config.load().servers == ()


def test_horovods_names_are_honoured_and_ours_win(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "33554432")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3.5")
    loaded = config.load()
    assert (loaded.fusion_threshold, loaded.cycle_time) == (32 * MIB, 0.0035)
    assert config.load(fusion_threshold="1MiB").fusion_threshold == MIB
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5ms")
    with pytest.raises(ConfigError, match=r"^HOROVOD_CYCLE_TIME: write .* of milliseconds, got"):
        config.load()
    monkeypatch.setenv("REDUCTION_CYCLE_TIME", "2ms")
    assert config.load().cycle_time == 0.002
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "much")
    with pytest.raises(ConfigError, match=r"^HOROVOD_FUSION_THRESHOLD: write .* of bytes, got"):
        config.load()


@pytest.mark.parametrize(
    ("local_world_size", "run", "restarts", "ends"),
    [
        ("2", "none", "0", True),
        ("1", "a-c10d-rendezvous", "0", True),
        ("1", "none", "3", True),
        ("1", "none", "0", False),
        ("2", None, "0", False),
    ],
)
def test_when_torchrun_ends_the_others(monkeypatch, local_world_size, run, restarts, ends):
    if run is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    assert config.torchrun_ends_the_others() == ends
