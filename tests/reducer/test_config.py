"""A reducer's settings: where they come from, what beats what, and what is wrong with them."""

import inspect
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from reducer import cli, kernels, runtime, units
from reducer import config as reducer_config
from reducer.commands import plan as plan_command
from reducer.commands import status as status_command
from reducer.errors import ConfigError
from reducer.server import Server
from reducer.wire.constants import MAX_LANES
from tests.commands import serving
from tests.launch.conftest import bare_environment
from worker_client import config

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "docs" / "deployment.md"
SCHEMA = ROOT / "docker" / "helm" / "reducer" / "values.schema.json"


pytestmark = pytest.mark.usefixtures("no_settings")


TABLE = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text())


@pytest.fixture
def defaults():
    """All settings without any; docs/settings.md has what they are, and test_docs.py compares."""
    return reducer_config.load().model_dump(mode="json")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "reducer.toml"


def load_file(file, text):
    """Return the settings of a reducer whose file holds this text."""
    file.write_text(text)
    return reducer_config.load_with_file(config=str(file)).model_dump(mode="json")


def written(file, name, text):
    return load_file(file, f"{name} = {json.dumps(text, ensure_ascii=False)}\n")


def test_every_setting_has_a_default_and_is_covered(defaults):
    assert reducer_config.load(**dict.fromkeys(defaults)).model_dump(mode="json") == defaults
    assert {name for name, *_ in TABLE["ways"]} == defaults.keys() - {"config"}


@pytest.mark.parametrize("way", TABLE["ways"])
def test_from_an_argument_from_the_environment_and_from_a_file(monkeypatch, file, defaults, way):
    name, text, value = way
    monkeypatch.setenv("REDUCTION_SERVERS", "of no interest to a reducer")
    assert written(file, name, text) == defaults | {name: value, "config": str(file)}
    assert reducer_config.load(**{name: text}).model_dump(mode="json") == defaults | {name: value}
    monkeypatch.setenv(f"REDUCTION_{name.upper()}", text)
    assert reducer_config.load().model_dump(mode="json") == defaults | {name: value}


@pytest.mark.parametrize(("name", "text", "why"), TABLE["mistakes"])
def test_a_mistake_is_named_wherever_it_is(monkeypatch, file, name, text, why):
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
    monkeypatch.setenv("REDUCTION_KEYS", "/etc/keys")
    assert reducer_config.load(keys="").keys is None


@pytest.mark.parametrize(
    ("host", "loopback", "private"),
    [
        *((host, True, True) for host in ("127.0.0.1", "127.1.2.3", "[::1]", "localhost")),
        *((host, False, True) for host in ("10.0.0.1", "172.16.0.1", "100.64.0.1", "[fd00::1]")),
        *((host, False, False) for host in ("0.0.0.0", "[::]", "*", "8.8.8.8")),  # noqa: S104
        *((host, False, False) for host in ("[2001:4860::1]", "[::ffff:0:0]", "[::ffff:808:808]")),
        *((host, False, False) for host in ("no-such-host.invalid", "localhost.example", "eth0")),
    ],
)
def test_who_may_listen_beyond_this_machine(host, loopback, private):
    bind = f"tcp://{host}:0"
    assert (units.is_loopback(bind), units.is_private(bind)) == (loopback, private)
    if not loopback:
        with pytest.raises(ConfigError, match=r"other machines.*pass --keys.*pass --insecure"):
            reducer_config.load(bind=bind)
    settings = reducer_config.load(bind=bind, impl="plain", insecure=not loopback)
    assert settings.bind == bind
    if not private:
        with pytest.raises(ConfigError, match="serves loopback and private networks"):
            settings.check_for_reference()


def test_what_kubernetes_says_of_a_service_is_no_setting(monkeypatch):
    told = re.findall(r'"REDUCTION_(BUILD_\w+)"', (ROOT / "setup.py").read_text())
    told += ["SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_5555_TCP_PROTO"]
    told += ["PORT_8080_UDP_ADDR", "POOL_SERVICE_HOST", "SERVER_PORT_5555_TCP"]
    for name in told:
        monkeypatch.setenv(f"REDUCTION_{name}", "tcp://10.0.0.7:5555")
    reducer_config.load()
    config.load()


@pytest.mark.parametrize("load", [reducer_config.load, config.load])
def test_an_unknown_variable_is_an_error_of_both(monkeypatch, load):
    for name, hint in (
        ("MEMORY_LIMITS", r"did you mean REDUCTION_MEMORY_LIMIT\?"),
        ("SERVER", r"did you mean REDUCTION_SERVERS\?"),
        ("XYZZY", "known are .*REDUCTION_BIND, "),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"REDUCTION_{name}", "")
            with pytest.raises(ConfigError, match=f"unknown setting REDUCTION_{name}: {hint}"):
                load()


@pytest.mark.parametrize("text", ["1h", "60min", "3600s", "3600", "3600000ms", "3600000000 us"])
def test_durations_are_alike_everywhere(text):
    assert reducer_config.load(handshake_timeout=text).handshake_timeout == 3600
    assert config.load(timeout=text).timeout == 3600
    assert plan_command.seconds("backward", text) == 3600


@pytest.mark.parametrize("text", ["127.0.0.1:7", "tcp://127.0.0.1:7", " 127.0.0.1:7"])
def test_addresses_are_alike_everywhere(text):
    assert reducer_config.load(bind=text).bind == "tcp://127.0.0.1:7"
    assert reducer_config.load(http=text).http == "127.0.0.1:7"
    assert config.load(servers=text).servers == ("127.0.0.1:7",)
    assert status_command.addresses(text) == ["127.0.0.1:7"]


def test_every_mistake_is_told():
    with pytest.raises(ConfigError, match=r"^bind: .*\nmemory_limit: .*\nport: Extra inputs"):
        reducer_config.load(bind="x", memory_limit=0, port=5555)


@pytest.mark.parametrize("value", ["soon", 0, float("nan"), None, "\N{FULLWIDTH DIGIT FIVE}s"])
def test_no_duration(value):
    with pytest.raises(ConfigError, match=r"^timeout: .*got"):
        config.seconds("timeout", value)


def test_threads_share_what_is_limited(monkeypatch):
    settings = reducer_config.load(
        threads=4,
        job_memory_limit="1GiB",
        max_connections=1000,
        handshake_timeout="2s",
        port_buffer="1MiB",
    )
    assert settings.limits().job_memory_limit == 256 << 20
    assert reducer_config.load().limits().job_memory_limit is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert settings.connection_limits() == (250, 4.0, 500, 256 << 10)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (464, 464))
    here = (464 - reducer_config.FILES_BESIDES) // 4
    most = settings.connection_limits()
    assert most[:3] == (here, 4.0, here), "no more files, whatever they are for"
    few = reducer_config.load(threads=4, max_connections=300)
    assert few.connection_limits()[::2] == (75, here)
    watched = reducer_config.load(threads=4, max_connections=1000, http=":0")
    assert watched.http_connections == 464 // 8
    beside = reducer_config.FILES_BESIDES + 464 // 8
    assert watched.connection_limits().max_connections == (464 - beside) // 4


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("memory_limit = 17_179_869_184", 16 << 30),
        ("insecure = true", True),
        ("handshake_timeout = 2", 2.0),
        ("http = 9090", "127.0.0.1:9090"),
        ("cpus = [0]", [0]),
    ],
)
def test_values_have_the_types_of_toml_where_these_fit(file, defaults, line, value):
    name = line.partition(" ")[0]
    assert load_file(file, line) == {**defaults, "config": str(file), name: value}


def test_options_beat_variables_which_beat_the_file_which_beats_defaults(file, monkeypatch):
    file.write_text("max_jobs = 1\nmax_ranks = 1\nthreads = 1\n")
    monkeypatch.setenv("REDUCTION_MAX_RANKS", "2")
    monkeypatch.setenv("reduction_threads", "2")  # variables are known in any case
    settings = reducer_config.load_with_file(config=str(file), threads=3, max_jobs=None)
    assert (settings.max_jobs, settings.max_ranks, settings.threads) == (1, 2, 3)
    assert settings.max_connections == 8192


def test_the_file_is_named_by_the_option_or_the_variable(file, monkeypatch):
    monkeypatch.setenv("REDUCTION_CONFIG", str(file))
    with pytest.raises(ConfigError, match=r"reducer\.toml.*cannot be read: No such file"):
        reducer_config.load_with_file()
    config.load()  # workers, and what they host, read none
    assert reducer_config.load().max_jobs == 256
    file.write_text("max_jobs = 1")
    assert reducer_config.load_with_file().max_jobs == 1
    assert reducer_config.load_with_file(config="").max_jobs == 256
    monkeypatch.setenv("REDUCTION_CONFIG", "other.toml")
    assert reducer_config.load_with_file(config=str(file)).max_jobs == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('memory_limits = "1GiB"', "unknown key 'memory_limits': did you mean memory_limit?"),
        ("max-jobs = 1", "unknown key 'max-jobs': did you mean max_jobs?"),
        ("[xyzzy]\nthreads = 1", "unknown key 'xyzzy': known are bind, cpus, drain_timeout, "),
        ('servers = "a:1"', "unknown key 'servers': it is a setting of workers"),
        ('config = "b.toml"', "unknown key 'config': a file cannot name another one"),
        ("handshake_timeout = true", "handshake_timeout: write a duration such as 300s"),
        ('cpus = [0, "x"]', "cpus: write CPUs such as 0-3,8"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_name(file, text, says):
    said = refused(file, text.encode())
    assert said.startswith(f"{file}: {says}")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"threads = 1\nmax_jobs 2\n", "at line 2, column 10"),
        (b"threads = 1\n\nkeys = '\xff'\n\n", "line 3 has bytes that are no UTF-8"),
    ],
)
def test_what_is_no_toml_is_refused_with_the_line(file, text, line):
    said = refused(file, text)
    assert said.startswith(f"{file} is no TOML: ")
    assert line in said
    assert "\n" not in said


def test_the_file_is_not_blamed_for_what_others_say(file, monkeypatch):
    monkeypatch.setenv("REDUCTION_THREADS", "none")
    said = refused(file, b'threads = 4\nio_threads = "few"').splitlines()
    assert said[0].startswith("threads: ")
    assert said[1].startswith(f"{file}: io_threads: ")


def refused(file, text):
    """Return why a file with this text is refused."""
    file.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        reducer_config.load_with_file(config=str(file))
    return str(caught.value)


def test_the_page_of_deployment_has_a_file_that_can_be_read(file, defaults):
    (example,) = re.findall(r"```toml\n(.*?)```", DEPLOYMENT.read_text(), flags=re.S)
    settings = load_file(file, example)
    keys = re.findall(r"^(\w+) = ", example, flags=re.M)
    assert len(keys) == 7
    assert [key for key in keys if settings[key] == defaults[key]] == []


def test_the_command_reads_it_and_says_so(file):
    file.write_text('max_jobs = 5\nbind = "here"\n')  # of which an option beats the second
    with serving(
        *("--config", file, "--log-format", "json"), stderr=subprocess.PIPE, env=bare_environment()
    ) as (process, *_):
        process.terminate()
        settings = process.stderr.readline()
    assert f'"config": "{file}"' in settings
    assert '"max_jobs": 5' in settings


def test_the_charts_schema_knows_the_settings():
    schema = json.loads(SCHEMA.read_text())["properties"]
    apart = {"memory_limit", "threads"}  # are values of their own
    apart |= {"bind", "http", "keys", "insecure"}  # the chart decides
    apart |= {"config", "stop_at_eof", "timeline"}  # a pod has no file, no input, and writes none
    known = schema["settings"]["properties"]
    options = inspect.signature(cli.serve).parameters
    assert list(known) == [name for name in options if name not in apart]
    assert apart < set(options)
    kernel_names = [*get_args(reducer_config.KernelName)]
    assert known["kernel"]["enum"] == kernel_names
    assert set(kernels.variants()) <= set(kernel_names)
    assert known["impl"]["enum"] == [*get_args(reducer_config.ImplName)]
    assert known["log_level"]["enum"] == [level.value for level in cli.LogLevel]
    assert known["log_format"]["enum"] == [form.value for form in cli.LogFormat]
    assert schema["threads"]["maximum"] == MAX_LANES


def test_where_nothing_was_compiled_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "reducer.runtime._loop", None)
    monkeypatch.delattr(runtime, "_loop", raising=False)
    with pytest.raises(ConfigError, match="was not built: install a C compiler"):
        Server(reducer_config.load(bind="tcp://127.0.0.1:0"))
