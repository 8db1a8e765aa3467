"""A reducer's settings: where they come from, and what is wrong with them."""

import json
import re
import resource
from pathlib import Path
from typing import get_args

import pytest

from reducer import config as reducer_config
from reducer import failpoints, kernels, units
from reducer.commands import plan as plan_command
from reducer.commands import status as status_command
from reducer.config import ReducerConfig
from reducer.errors import ConfigError
from reducer.server import Server
from worker_client import config
from worker_client.config import WorkerConfig

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("no_settings")


DEFAULTS = {
    "bind": "tcp://127.0.0.1:5555",
    "memory_limit": 8 << 30,
    "job_memory_limit": None,
    "max_jobs": 256,
    "max_jobs_per_key": 64,
    "max_rounds": 131072,
    "max_ranks": 4096,
    "max_chunk_bytes": 4 << 20,
    "max_connections": 8192,
    "max_connections_per_key": None,
    "handshake_timeout": 5.0,
    "drain_timeout": 8.0,
    "keys": None,
    "insecure": False,
    "kernel": None,
    "threads": 1,
    "io_threads": 1,
    "cpus": None,
    "impl": None,
    "http": None,
    "timeline": None,
    "config": None,
    "failpoints": "",
}
# Setting, how it may be written, and what that means.
WAYS = [
    ("bind", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
    ("bind", "127.0.0.1:7", "tcp://127.0.0.1:7"),
    ("memory_limit", "64MB", 64_000_000),
    ("memory_limit", "67108864", 64 * MIB),
    ("job_memory_limit", "1GiB", 1 << 30),
    ("max_jobs", "7", 7),
    ("max_jobs_per_key", "6", 6),
    ("max_rounds", "5", 5),
    ("max_ranks", "8", 8),
    ("max_chunk_bytes", "1MiB", MIB),
    ("max_connections", "9", 9),
    ("max_connections_per_key", "3", 3),
    ("handshake_timeout", "500ms", 0.5),
    ("drain_timeout", "2min", 120.0),
    ("keys", "/etc/keys", Path("/etc/keys")),
    ("keys", "", None),
    ("insecure", "1", True),
    ("kernel", "generic", "generic"),
    ("threads", "2", 2),
    ("io_threads", "3", 3),
    ("cpus", "0", (0,)),
    ("impl", "plain", "plain"),
    ("http", "9090", "127.0.0.1:9090"),
    ("http", ":9090", "127.0.0.1:9090"),
    ("http", "0.0.0.0:9090", "0.0.0.0:9090"),
    ("http", "[::1]:9090", "[::1]:9090"),
    ("http", "off", None),
    ("http", "", None),
    ("timeline", "/var/timelines", Path("/var/timelines")),
    ("failpoints", "reducer.placed=kill@3", "reducer.placed=kill@3"),
]
NO_BINDS = (
    *("", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://:5555", "tcp://127.0.0.1:65536"),
    *("tcp://127.0.0.1:-1", "tcp://127.0.0.1:5555/path", "tcp://::1:5555", "ipc:///tmp/socket"),
    *("tcp://127.0.0.1:5555,tcp://0.0.0.0:5555", "udp://127.0.0.1:5555"),
)
MISTAKES = [
    *(("bind", text, "write it as HOST:PORT, with .* got ") for text in NO_BINDS),
    ("memory_limit", "0", "got '0'"),
    ("memory_limit", "-1", "got '-1'"),
    ("memory_limit", "lots", "write bytes such as 8GiB or 8589934592.*got 'lots'"),
    ("max_jobs", "0", "got '0'"),
    ("max_chunk_bytes", "5MiB", "got '5MiB'"),
    ("handshake_timeout", "soon", "got 'soon'"),
    ("insecure", "maybe", "got 'maybe'"),
    ("threads", "100", "it must be at most"),
    ("kernel", "mmx", "should be 'avx512', 'avx2', 'neon', 'generic' or 'numpy'"),
    ("cpus", "all", "write CPUs such as 0-3,8"),
    ("cpus", "\N{ARABIC-INDIC DIGIT ONE}", "write CPUs such as 0-3,8"),
    ("cpus", "", "write CPUs such as 0-3,8"),
    ("cpus", "1-0", "this process may run on CPUs"),
    ("cpus", "0,99999", "this process may run on CPUs"),
    ("cpus", f"0-{10**20}", "this process may run on CPUs"),
    *(
        ("http", text, "write it as HOST:PORT, or PORT, or off, got ")
        for text in ("on", "host", "host:", "1:2:3", "http://host:1", "host:99999")
    ),
]


def written(file, name, text):
    file.write_text(f"{name} = {json.dumps(text, ensure_ascii=False)}\n")
    return reducer_config.load_with_file(config=str(file)).model_dump()


def test_every_setting_has_a_default_and_is_covered():
    assert reducer_config.load(**dict.fromkeys(DEFAULTS)).model_dump() == DEFAULTS
    assert {name for name, *_ in WAYS} == DEFAULTS.keys() - {"config"}


@pytest.mark.parametrize(("name", "text", "value"), WAYS)
def test_from_an_argument_from_the_environment_and_from_a_file(
    monkeypatch, tmp_path, name, text, value
):
    monkeypatch.setenv("REDUCTION_SERVERS", "of no interest to a reducer")
    file = tmp_path / "reducer.toml"
    assert written(file, name, text) == DEFAULTS | {name: value, "config": file}
    assert reducer_config.load(**{name: text}).model_dump() == DEFAULTS | {name: value}
    monkeypatch.setenv(f"REDUCTION_{name.upper()}", text)
    assert reducer_config.load().model_dump() == DEFAULTS | {name: value}


@pytest.mark.parametrize(("name", "text", "why"), MISTAKES)
def test_a_mistake_is_named_wherever_it_is(monkeypatch, tmp_path, name, text, why):
    file = tmp_path / "reducer.toml"
    with pytest.raises(ConfigError, match=f"^{re.escape(str(file))}: {name}: .*{why}"):
        written(file, name, text)
    with pytest.raises(ConfigError, match=f"^{name}: .*{why}"):
        reducer_config.load(**{"insecure": True, name: text})
    monkeypatch.setenv(f"REDUCTION_{name.upper()}", text)
    with pytest.raises(ConfigError, match=f"^{name}: .*{why}"):
        reducer_config.load()


def test_empty_keys_are_none(monkeypatch):
    monkeypatch.setenv("REDUCTION_KEYS", "")
    assert reducer_config.load().keys is None
    with pytest.raises(ConfigError, match="nothing would check who connects"):
        reducer_config.load(bind="tcp://10.0.0.1:5555")
    monkeypatch.setenv("REDUCTION_KEYS", "/etc/keys")
    assert reducer_config.load(keys="").keys is None


LOOPBACK = ["127.0.0.1", "127.1.2.3", "[::1]", "localhost"]
EXPOSED = ["0.0.0.0", "10.0.0.1", "*", "eth0", "[::]", "node.example", "localhost.example"]  # noqa: S104


@pytest.mark.parametrize("host", LOOPBACK)
def test_this_machine_needs_no_permission(host):
    bind = f"tcp://{host}:0"
    assert units.is_loopback(bind)
    assert reducer_config.load(bind=bind).bind == bind


@pytest.mark.parametrize(
    ("host", "private"),
    [
        *((host, True) for host in LOOPBACK),
        *((host, True) for host in ("10.0.0.1", "172.16.0.1", "100.64.0.1", "[fd00::1]")),
        *((host, False) for host in ("0.0.0.0", "[::]", "*", "8.8.8.8", "[2001:4860::1]")),  # noqa: S104
        *((host, False) for host in ("[::ffff:0:0]", "[::ffff:808:808]")),
        ("no-such-host.invalid", False),
    ],
)
def test_the_plain_loop_listens_in_private_networks_alone(host, private):
    bind = f"tcp://{host}:0"
    assert units.is_private(bind) == private
    if not private:
        with pytest.raises(ConfigError, match="serves loopback and private networks"):
            Server(reducer_config.load(bind=bind, impl="plain", insecure=True))


def test_what_kubernetes_says_of_a_service_is_no_setting(monkeypatch):
    told = {
        "SERVICE_HOST": "10.0.0.7",
        "SERVICE_PORT": "5555",
        "SERVICE_PORT_HTTP": "8080",
        "PORT": "tcp://10.0.0.7:5555",
        "PORT_5555_TCP": "tcp://10.0.0.7:5555",
        "PORT_5555_TCP_PROTO": "tcp",
        "PORT_5555_TCP_PORT": "5555",
        "PORT_8080_UDP_ADDR": "x",
    }
    told |= {"POOL_SERVICE_HOST": "10.0.0.7", "SERVER_PORT_5555_TCP": "tcp://10.0.0.7:5555"}
    read = (Path(__file__).parents[2] / "setup.py").read_text()
    told |= dict.fromkeys(re.findall(r'"REDUCTION_(BUILD_\w+)"', read), "1")
    for name, value in told.items():
        monkeypatch.setenv(f"REDUCTION_{name}", value)
    reducer_config.load()
    config.load()


def test_an_unknown_variable_is_an_error_of_both(monkeypatch):
    for wrong, meant in (("MEMORY_LIMITS", "MEMORY_LIMIT"), ("SERVER", "SERVERS")):
        with monkeypatch.context() as patch:
            patch.setenv(f"REDUCTION_{wrong}", "8GiB")
            for load in (reducer_config.load, config.load):
                with pytest.raises(
                    ConfigError,
                    match=f"unknown setting REDUCTION_{wrong}: did you mean REDUCTION_{meant}\\?",
                ):
                    load()
    monkeypatch.setenv("REDUCTION_XYZZY", "")
    with pytest.raises(ConfigError, match=r"known are .*REDUCTION_BIND, "):
        reducer_config.load()


def test_kernels_have_the_names_that_the_setting_takes():
    assert set(kernels.variants()) <= set(get_args(reducer_config.KernelName))


def test_each_knows_the_others_settings():
    ours, theirs = set(ReducerConfig.model_fields), set(WorkerConfig.model_fields)
    assert set(reducer_config.WORKER_SETTINGS) == theirs - ours
    assert set(config.REDUCER_SETTINGS) == ours


@pytest.mark.parametrize("text", ["1h", "60min", "3600s", "3600", "3600000ms", "3600000000 us"])
def test_durations_are_alike_everywhere(text):
    assert reducer_config.load(handshake_timeout=text).handshake_timeout == 3600
    assert config.load(timeout=text).timeout == 3600
    assert plan_command.seconds("backward", text) == 3600
    assert failpoints.parse(f"reducer.tick=delay:{text}")[0].delay_s == 3600


@pytest.mark.parametrize("text", ["127.0.0.1:7", "tcp://127.0.0.1:7", " 127.0.0.1:7"])
def test_addresses_are_alike_everywhere(text):
    assert reducer_config.load(bind=text).bind == "tcp://127.0.0.1:7"
    assert reducer_config.load(http=text).http == "127.0.0.1:7"
    assert config.load(servers=text).servers == ("127.0.0.1:7",)
    assert status_command.addresses(text) == ["127.0.0.1:7"]


@pytest.mark.parametrize("host", EXPOSED)
def test_beyond_this_machine_only_when_insecure(host):
    bind = f"tcp://{host}:5555"
    assert not units.is_loopback(bind)
    with pytest.raises(ConfigError, match=r"other machines.*pass --keys.*pass --insecure"):
        reducer_config.load(bind=bind)
    with pytest.raises(ConfigError, match="--insecure"):
        reducer_config.load(bind=bind, insecure=False)
    assert reducer_config.load(bind=bind, insecure=True).bind == bind


def test_every_mistake_at_the_reducer_is_told():
    with pytest.raises(ConfigError, match=r"^bind: .*\nmemory_limit: "):
        reducer_config.load(bind="x", memory_limit=0)


def test_an_unknown_argument_of_the_reducer_is_an_error():
    with pytest.raises(ConfigError, match=r"^port: Extra inputs"):
        reducer_config.load(port=5555)


@pytest.mark.parametrize(("value", "seconds"), [("5ms", 0.005), ("2min", 120.0), (3, 3.0)])
def test_a_duration_given_as_an_argument(value, seconds):
    assert config.seconds("timeout", value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["soon", 0, -1, float("nan"), None, "\N{FULLWIDTH DIGIT FIVE}s"])
def test_no_duration(value):
    with pytest.raises(ConfigError, match=r"^timeout: .*got"):
        config.seconds("timeout", value)


def test_threads_share_what_is_limited(monkeypatch):
    settings = reducer_config.load(
        threads=4, job_memory_limit="1GiB", max_connections=1000, handshake_timeout="2s"
    )
    assert settings.limits().job_memory_limit == 256 << 20
    assert reducer_config.load().limits().job_memory_limit is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert settings.patience() == (250, 4.0, 500)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (464, 464))
    here = (464 - reducer_config.FILES_BESIDES) // 4
    assert settings.patience() == (here, 4.0, here), "no more files, whatever they are for"
    few = reducer_config.load(threads=4, max_connections=300)
    assert few.patience()[::2] == (75, here)
    watched = reducer_config.load(threads=4, max_connections=1000, http=":0")
    assert watched.http_connections == 464 // 8
    beside = reducer_config.FILES_BESIDES + 464 // 8
    assert watched.patience().max_connections == (464 - beside) // 4
