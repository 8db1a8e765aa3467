"""Settings of the worker: where they come from, and what is refused."""

import inspect
import json
import re
from pathlib import Path

import pytest

import worker_client
from reducer import config as reducer_config
from reducer.errors import ConfigError
from worker_client import config
from worker_client.client import bootstrap
from worker_client.launch import Launcher

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("no_settings")


# -- the worker: sources and units --------------------------------------------------------------

# Setting, how it may be written, and what that means; the first differs from the second.
WAYS = [
    ("servers", "a:1,b:2", ("a:1", "b:2")),
    ("servers", " a:1 , b.example:65535,", ("a:1", "b.example:65535")),
    ("servers", "[::1]:5555", ("[::1]:5555",)),
    ("servers", "[fe80::1%eth0]:5555", ("[fe80::1%eth0]:5555",)),
    ("servers", "", ()),
    ("embedded", "1", True),
    ("embedded", "false", False),
    ("interface", "eth1", "eth1"),
    ("interface", "10.0.0.0/8", "10.0.0.0/8"),
    ("job", "digits", "digits"),
    ("job", "x" * 122, "x" * 122),
    ("generation", "3", 3),
    ("generation", "4294967295", (1 << 32) - 1),
    ("chunk_bytes", "65536", 65536),
    ("chunk_bytes", "64KiB", 65536),
    ("chunk_bytes", "64kb", 64000),
    ("chunk_bytes", "4MiB", 4 * MIB),
    ("chunk_bytes", "auto", 0),
    ("window_bytes", "67108864", 64 * MIB),
    ("window_bytes", "64MB", 64_000_000),
    ("window_bytes", "64MiB", 64 * MIB),
    ("window_bytes", "1.5 GiB", 1536 * MIB),
    ("window_bytes", "auto", 0),
    ("timeout", "2s", 2.0),
    ("timeout", "5ms", 0.005),
    ("timeout", "1.5", 1.5),
    ("streams", "auto", 0),
    ("streams", "16", 16),
    ("timeout", " 2 min ", 120.0),
    ("timeout", "1h", 3600.0),
    ("connect_timeout", "250us", 0.00025),
    ("connect_timeout", "30", 30.0),
    ("wait_for_reducers", "60s", 60.0),
    ("wait_for_reducers", "0", 0.0),
    ("heartbeat", "400ms", 0.4),
    ("patience", "10s", 10.0),
    ("patience", "500ms", 0.5),
    ("fusion_threshold", "32MiB", 32 * MIB),
    ("fusion_threshold", "0", 0),
    ("cycle_time", "5ms", 0.005),
    ("fallback", "process-group", "process-group"),
    ("on_rank_lost", "continue", "continue"),
    ("join", "1", True),
    ("hierarchy", "auto", "auto"),
    ("wire_dtype", "bf16", "bf16"),
    ("wire_dtype", "int8", "int8"),
    ("wire_dtype", "fp8_e4m3", "fp8_e4m3"),
    ("wire_dtype", "fp16", "fp16"),
    ("keys", "/etc/job keys", Path("/etc/job keys")),
    ("encrypt", "1", True),
    ("impl", "plain", "plain"),
    ("impl", "compiled", "compiled"),
    ("io_threads", "2", 2),
    ("timeline", "/var/timelines", Path("/var/timelines")),
    ("dump", "/var/dumps of ours", Path("/var/dumps of ours")),
    ("failpoints", "worker.copied=kill@3", "worker.copied=kill@3"),
]
DEFAULTS = {
    "servers": (),
    "embedded": None,
    "interface": "",
    "job": None,
    "generation": 0,
    "chunk_bytes": 0,
    "window_bytes": 0,
    "streams": 0,
    "timeout": 300.0,
    "connect_timeout": 10.0,
    "wait_for_reducers": 0.0,
    "heartbeat": 0.2,
    "patience": 1.0,
    "fusion_threshold": 64 * MIB,
    "cycle_time": 0.001,
    "fallback": "error",
    "on_rank_lost": "error",
    "join": False,
    "hierarchy": "off",
    "wire_dtype": "none",
    "keys": None,
    "encrypt": False,
    "impl": None,
    "io_threads": 1,
    "timeline": None,
    "dump": None,
    "failpoints": "",
}


def test_every_setting_is_covered():
    assert set(config.WorkerConfig.model_fields) == set(DEFAULTS) == {name for name, *_ in WAYS}


def test_defaults():
    assert config.load().model_dump() == DEFAULTS
    assert config.load(**dict.fromkeys(DEFAULTS)).model_dump() == DEFAULTS  # None: not given


@pytest.mark.parametrize("text", ["", " "])
def test_empty_names_of_servers_and_keys_are_none(monkeypatch, text):
    monkeypatch.setenv("REDUCTION_SERVERS", text)
    monkeypatch.setenv("REDUCTION_KEYS", text)
    assert config.load().model_dump() == DEFAULTS
    monkeypatch.setenv("REDUCTION_KEYS", "/etc/keys")
    assert config.load(keys=text).keys is None


@pytest.mark.parametrize(("name", "text", "value"), WAYS)
def test_from_an_argument_and_from_the_environment(monkeypatch, name, text, value):
    expected = DEFAULTS | {name: pytest.approx(value)}
    assert config.load(**{name: text}).model_dump() == expected
    monkeypatch.setenv(f"REDUCTION_{name.upper()}", text)
    assert config.load().model_dump() == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"servers": ["a:1", "b:2"]},
        {"servers": ("a:1",)},
        {"generation": 7},
        {"chunk_bytes": 65536},
        {"window_bytes": 64 * MIB},
        {"timeout": 2},
        {"timeout": 0.005},
        {"connect_timeout": 30.0},
    ],
    ids=str,
)
def test_arguments_that_are_no_text(arguments):
    ((name, value),) = arguments.items()
    expected = tuple(value) if name == "servers" else value
    assert getattr(config.load(**arguments), name) == expected


@pytest.mark.parametrize(
    ("name", "argument", "environment"),
    [
        ("servers", "a:1", "b:2"),
        ("servers", (), "b:2"),
        ("job", "argument", "environment"),
        ("generation", 0, "5"),
        ("chunk_bytes", 0, "64KiB"),
        ("window_bytes", 1 * MIB, "64MB"),
        ("timeout", 5.0, "2s"),
        ("connect_timeout", 5.0, "rubbish"),  # which nobody needs
    ],
)
def test_an_argument_beats_the_environment(monkeypatch, name, argument, environment):
    monkeypatch.setenv(f"REDUCTION_{name.upper()}", environment)
    expected = ("a:1",) if argument == "a:1" else argument
    assert getattr(config.load(**{name: argument}), name) == expected


def test_a_configuration_does_not_change():
    with pytest.raises(ValueError, match="frozen"):
        config.load().timeout = 1.0


# -- the worker: mistakes -----------------------------------------------------------------------

MISTAKES = [
    ("servers", "localhost", "write it as HOST:PORT"),
    ("servers", "localhost:0", "a port other than 0"),
    ("servers", "a:1,::1:5", "write it as HOST:PORT"),
    ("servers", "a:1,b:2,a:1", "appears twice"),
    ("servers", "a..b:1", "'a..b' is no name of a host"),
    ("job", "x" * 123, "at most 122"),
    ("generation", "-1", "it must be at least 0"),
    ("generation", "4294967296", "less than"),
    ("generation", "two", "integer"),
    ("chunk_bytes", "100", "a multiple of 64"),
    ("chunk_bytes", "8MiB", "it must be at most 4194304"),
    ("chunk_bytes", "-64", "write bytes such as"),
    ("chunk_bytes", "", "write bytes such as"),
    ("streams", "17", "write auto, or a number from 1 to 16"),
    ("streams", "many", "write auto, or a number from 1 to 16"),
    ("window_bytes", "-1", "write bytes such as"),
    ("heartbeat", "50ms", "it must be at least 0.1 s"),
    ("patience", "400ms", "it must be at least 0.5 s"),
    ("patience", "2min", "it must be at most 60 s"),
    ("window_bytes", "64 apples", "write bytes such as"),
    ("timeout", "0", "it must be more than 0"),
    ("timeout", "-1", "write a duration such as"),
    ("timeout", "5 days", "write a duration such as"),
    ("timeout", "inf", "write a duration such as"),
    ("timeout", "", "write a duration such as"),
    ("connect_timeout", "0ms", "it must be more than 0 s"),
    ("connect_timeout", "soon", "write a duration such as"),
    ("failpoints", "worker.copy=kill", "known are .*worker.copied"),
]


@pytest.mark.parametrize(("name", "text", "why"), MISTAKES)
def test_a_mistake_is_named(monkeypatch, name, text, why):
    variable = f"REDUCTION_{name.upper()}"
    with pytest.raises(ConfigError, match=f"^{variable}: .*{why}.*got ") as of_argument:
        config.load(**{name: text})
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError) as of_environment:
        config.load()
    assert str(of_environment.value) == str(of_argument.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("servers", 7),
        ("timeout", -1),
        ("timeout", float("nan")),
        ("job", 7),
        ("job", "é" * 65),  # 130 bytes, as the protocol counts
    ],
)
def test_other_mistakes(name, value):
    with pytest.raises(ConfigError, match=f"^REDUCTION_{name.upper()}: "):
        config.load(**{name: value})


def test_every_mistake_is_told():
    with pytest.raises(ConfigError, match=r"REDUCTION_JOB: .*; REDUCTION_TIMEOUT: "):
        config.load(job="x" * 200, timeout="soon")


def test_an_unknown_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("REDUCTION_SERVER", "a:1")
    with pytest.raises(ConfigError, match=r"unknown setting .*_SERVER: .*REDUCTION_SERVERS"):
        config.load(servers="a:1")


def test_an_unknown_argument_is_an_error():
    with pytest.raises(ConfigError, match="REDUCTION_SERVER: Extra inputs"):
        config.load(server="a:1")


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
    for name in set(config.REDUCER_SETTINGS) - set(DEFAULTS):  # those that both read, both judge
        monkeypatch.setenv(f"REDUCTION_{name.upper()}", "not for the worker to judge")
    assert config.load().model_dump() == DEFAULTS


def test_bind_is_set(monkeypatch):
    assert not config.bind_is_set()
    monkeypatch.setenv("REDUCTION_BIND", "tcp://127.0.0.1:0")
    assert config.bind_is_set()


# -- what the launcher says ---------------------------------------------------------------------


def test_the_restart_count_is_the_generation(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert config.load().generation == 2
    assert config.load(generation=0).generation == 0
    monkeypatch.setenv("REDUCTION_GENERATION", "7")
    assert config.load().generation == 7
    assert config.load(generation=1).generation == 1


def test_launch(monkeypatch):
    nothing = config.launch()
    assert (nothing.launcher, nothing.rank, nothing.world_size) == (Launcher.NONE, None, None)
    assert (nothing.master_addr, nothing.job, nothing.restarts) == (None, None, 0)

    said = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "TORCHELASTIC_RUN_ID": "none"}
    said["GROUP_RANK"] = "2"
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    launched = config.launch()
    assert (launched.rank, launched.world_size, launched.node_rank) == (1, 4, 2)
    assert (launched.master_addr, launched.job) == ("node0", None)


def test_open_mpi_says_the_same_in_names_of_its_own(monkeypatch):
    said = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    for name, value in said.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    told = config.launch()
    assert (told.rank, told.world_size, told.local_rank, told.local_world_size) == (5, 8, 1, 4)
    monkeypatch.setenv("RANK", "7")  # torchrun, started by mpirun on each host
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert config.launch().rank == 7


def test_what_a_launcher_says_of_the_machine(monkeypatch):
    fields = ("local_rank", "local_world_size", "node_rank", "master_port")
    assert [getattr(config.launch(), field) for field in fields] == [None] * 4
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")
    for value, name in zip("0234", names, strict=True):
        monkeypatch.setenv(name, value)
    assert [getattr(config.launch(), field) for field in fields] == [0, 2, 3, 4]


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


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"])
def test_a_mistake_of_the_launcher_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "first")
    with pytest.raises(ConfigError, match=f"^{name}: .*integer.*got 'first'"):
        config.launch()


def test_horovods_names_are_honoured_and_ours_win(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "33554432")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3.5")
    loaded = config.load()
    assert (loaded.fusion_threshold, loaded.cycle_time) == (32 * MIB, 0.0035)
    monkeypatch.setenv("REDUCTION_CYCLE_TIME", "2ms")
    assert config.load(fusion_threshold="1MiB").fusion_threshold == MIB
    assert config.load().cycle_time == 0.002
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "much")
    with pytest.raises(ConfigError, match=r"^HOROVOD_FUSION_THRESHOLD: write .* of bytes, got"):
        config.load()
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    monkeypatch.delenv("REDUCTION_CYCLE_TIME")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5ms")
    with pytest.raises(ConfigError, match=r"^HOROVOD_CYCLE_TIME: write .* of milliseconds, got"):
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
