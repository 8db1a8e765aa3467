"""A file of settings for `reducer serve`: what it may hold, what beats it, and what is refused."""

import inspect
import json
import re
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from reducer import cli
from reducer import config as reducer_config
from reducer.errors import ConfigError
from reducer.wire.constants import MAX_LANES
from tests.commands import serving
from tests.launch.conftest import bare_environment
from worker_client import config

pytestmark = pytest.mark.usefixtures("no_settings")

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "docs" / "deployment.md"
SCHEMA = ROOT / "docker" / "helm" / "reducer" / "values.schema.json"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "reducer.toml"


def written(file, text):
    """Return the settings of a reducer whose file holds this text."""
    file.write_text(text)
    return reducer_config.load_with_file(config=str(file)).model_dump()


def refused(file, text):
    """Return why a file with this text is refused."""
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        reducer_config.load_with_file(config=str(file))
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("memory_limit = 17_179_869_184", 16 << 30),
        ("threads = 4", 4),
        ("insecure = true", True),
        ("handshake_timeout = 2", 2.0),
        ("drain_timeout = 2.5", 2.5),
        ("http = 9090", "127.0.0.1:9090"),
        ("cpus = [0]", (0,)),
    ],
)
def test_values_have_the_types_of_toml_where_these_fit(file, line, value):
    defaults = reducer_config.load().model_dump()
    name = line.partition(" ")[0]
    assert written(file, line) == {**defaults, "config": file, name: value}


def test_options_beat_variables_which_beat_the_file_which_beats_defaults(file, monkeypatch):
    file.write_text("max_jobs = 1\nmax_ranks = 1\nthreads = 1\n")
    monkeypatch.setenv("REDUCTION_MAX_RANKS", "2")
    monkeypatch.setenv("reduction_threads", "2")  # variables are known in any case
    settings = reducer_config.load_with_file(config=str(file), threads=3, max_jobs=None)
    assert (settings.max_jobs, settings.max_ranks, settings.threads) == (1, 2, 3)
    assert settings.max_connections == 8192


def test_the_file_is_named_by_the_option_or_the_variable(file, tmp_path, monkeypatch):
    file.write_text("max_jobs = 1")
    other = tmp_path / "other.toml"
    other.write_text("max_jobs = 2")
    monkeypatch.setenv("REDUCTION_CONFIG", str(file))
    assert reducer_config.load_with_file().max_jobs == 1
    assert reducer_config.load_with_file(config=str(other)).max_jobs == 2
    assert reducer_config.load_with_file(config="").max_jobs == 256
    monkeypatch.setenv("REDUCTION_CONFIG", "")
    assert reducer_config.load_with_file().config is None


def test_workers_and_what_they_host_read_none(file, monkeypatch):
    monkeypatch.setenv("REDUCTION_CONFIG", str(file))  # which is not there
    config.load()
    assert reducer_config.load().max_jobs == 256
    with pytest.raises(ConfigError, match=r"reducer\.toml.*cannot be read: No such file"):
        reducer_config.load_with_file()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('memory_limits = "1GiB"', "unknown key 'memory_limits': did you mean memory_limit?"),
        ("max-jobs = 1", "unknown key 'max-jobs': did you mean max_jobs?"),
        ("REDUCTION_THREADS = 1", "unknown key 'REDUCTION_THREADS': did you mean threads?"),
        ("[xyzzy]\nthreads = 1", "unknown key 'xyzzy': known are bind, cpus, drain_timeout, "),
        ('servers = "a:1"', "unknown key 'servers': it is a setting of workers"),
        ('config = "b.toml"', "unknown key 'config': a file cannot name another one"),
        ("threads = true", "threads: Input should be a valid integer"),
        ("handshake_timeout = true", "handshake_timeout: write a duration such as 300s"),
        ("threads = 100", "threads: it must be at most "),
        ('cpus = [0, "x"]', "cpus: write CPUs such as 0-3,8"),
        ("cpus = []", "cpus: write CPUs such as 0-3,8"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_name(file, text, says):
    said = refused(file, text)
    assert said.startswith(f"{file}: {says}")
    assert "\n" not in said


def test_the_file_is_not_blamed_for_what_others_say(file, monkeypatch):
    monkeypatch.setenv("REDUCTION_THREADS", "none")
    said = refused(file, 'threads = 4\nio_threads = "few"').splitlines()
    assert said[0].startswith("threads: ")
    assert said[1].startswith(f"{file}: io_threads: ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"threads = 1\nmax_jobs 2\n", "at line 2, column 10"),
        (b"threads = 1\nmax_jobs = ", "at line 2, the last)"),
        (b"threads = 1\n\nkeys = '\xff'\n\n", "line 3 has bytes that are no UTF-8"),
    ],
)
def test_what_is_no_toml_is_refused_with_the_line(file, text, line):
    said = refused(file, text)
    assert said.startswith(f"{file} is no TOML: ")
    assert line in said
    assert "\n" not in said


def test_the_page_of_deployment_has_a_file_that_can_be_read(file):
    page = DEPLOYMENT.read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    settings = written(file, example)
    keys = re.findall(r"^(\w+) = ", example, flags=re.M)
    assert len(keys) == 7
    defaults = reducer_config.load().model_dump()
    assert [key for key in keys if settings[key] == defaults[key]] == []
    assert (settings["memory_limit"], settings["http"]) == (16 << 30, "127.0.0.1:9090")


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
    assert known["kernel"]["enum"] == [*get_args(reducer_config.KernelName)]
    assert known["impl"]["enum"] == [*get_args(reducer_config.ImplName)]
    assert known["log_level"]["enum"] == [level.value for level in cli.LogLevel]
    assert known["log_format"]["enum"] == [form.value for form in cli.LogFormat]
    assert schema["threads"]["maximum"] == MAX_LANES
