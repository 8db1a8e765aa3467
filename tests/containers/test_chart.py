"""The Helm chart `docker/helm/reducer`, as Helm renders it.

It is held against the kustomization, against Kubernetes' schemas and against what a reducer takes.
"""

import json
import os
import re
from pathlib import Path
from subprocess import PIPE

import pytest

from reducer.config import ReducerConfig
from reducer.wire.constants import MAX_LANES
from tests.commands import REDUCER, run_command, serving
from tests.containers.chart import (
    CASES,
    CHART,
    DIFFERENT,
    NAMESPACE,
    VALUES,
    helm,
    render,
    written,
)
from tests.containers.manifests import (
    KUBERNETES,
    check_kubernetes,
    check_observed,
    read,
)
from tests.golden import check_golden

OPERATORS = {"PodMonitor", "PrometheusRule"}  # kinds that Prometheus' operator has
CPU = min(os.sched_getaffinity(0))


def test_it_renders_what_the_kustomization_says_and_what_values_change():
    """And no value gives a reducer rights: there nothing differs from the kustomization."""
    text = written()
    check_golden(Path(__file__).with_name("chart.json"), text)
    assert not re.search("securityContext|automount|volumeMounts|Probe", text)


def test_its_defaults_are_the_reducers():
    values = read(CHART / "values.yaml")
    fields = ReducerConfig.model_fields
    assert values["threads"] == fields["threads"].default
    assert values["memoryGiB"] * 2**30 == fields["memory_limit"].default
    assert values["terminationGracePeriodSeconds"] > fields["drain_timeout"].default
    assert read(CHART / "Chart.yaml")["kubeVersion"] == f">={KUBERNETES}-0"


@pytest.mark.parametrize("name", CASES)
def test_helm_kubernetes_and_the_operator_take_it(name):
    done = helm("lint", "--strict", CHART, values=CASES[name][0])
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
    for kind, resource in render(*CASES[name]).items():
        (check_observed if kind in OPERATORS else check_kubernetes)(resource)
        if kind == "PrometheusRule":  # which chart.json leaves out
            assert resource["spec"] == read("prometheus/reducers.rules.yaml")


def test_a_reducer_takes_its_arguments(tmp_path):
    """All settings that are on, with this machine's addresses and keys in place of a pod's."""
    (container,) = render(DIFFERENT)["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    serve, *options = container["args"]
    assert serve == "serve"
    of_pod = ("--bind=tcp://0.0.0.0:5555", "--http=0.0.0.0:9090", "--keys=/keys")
    assert set(of_pod) <= set(options)
    keys = tmp_path / "keys"
    run_command(*REDUCER, "keygen", keys, "--job", "train").check_returncode()
    given = [option for option in options if option not in of_pod]
    given[given.index("--cpus=0")] = f"--cpus={CPU}"
    with serving(*given, f"--keys={keys / 'pool'}", stderr=PIPE) as running:
        running.process.terminate()
        assert running.process.stderr
        logged = [json.loads(line) for line in running.process.stderr]
    (settings,) = (line for line in logged if line["event"] == "settings")
    assert settings["threads"] == 4
    assert settings["memory_limit"] == 2 * 2**30
    assert settings["job_memory_limit"] == 512 * 2**20
    assert settings["max_connections"] == 1000000
    assert settings["drain_timeout"] == 1.5
    assert (settings["kernel"], settings["cpus"]) == ("generic", [CPU])


def test_the_notes_name_the_reducers():
    arguments = ("--namespace", NAMESPACE, "--dry-run=client")
    done = helm("install", "fast", CHART, *arguments, values={"replicas": 3})
    if "cluster unreachable" in done.stderr:
        pytest.skip("Helm 3 asks a cluster before it prints notes")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("\nNOTES:\n")[2]
    hosts = [f"fast-reducer-{index}.fast-reducer.{NAMESPACE}:5555" for index in range(3)]
    assert f"    REDUCTION_SERVERS={','.join(hosts)}\n" in f"{notes}\n"
    assert "create secret generic reducer-keys --from-file=keys/pool" in notes
    assert 'reduction-server/worker: "true"' in notes
    assert "image.repository is not set" in notes


def test_a_long_name_leaves_room_for_what_kubernetes_adds():
    found = render(release="r" * 53)  # Helm takes no longer one
    assert len(found["StatefulSet"]["metadata"]["name"]) <= 63 - len("-5d8c7b9f4d")


@pytest.mark.parametrize(
    ("values", "named"), [*VALUES["refused"], ({"threads": MAX_LANES + 1}, "threads")], ids=str
)
def test_what_is_wrong_is_named(values, named):
    done = helm("template", "reducer", CHART, values=values)
    assert done.returncode != 0
    assert re.search(rf"\b{re.escape(named)}\b", done.stderr), done.stderr
    assert done.stdout == ""


def schemas(schema, values):
    """Return the schema of every object that refuses unknown keys, with its default."""
    yield schema, values
    for name, one in schema["properties"].items():
        if "properties" in one and "required" in one:
            yield from schemas(one, values[name])


def test_the_schema_knows_all_values_and_no_others():
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = list(schemas(schema, read(CHART / "values.yaml")))
    assert len(found) == 5
    for at, (one, values) in enumerate(found):
        assert one["additionalProperties"] is False
        # Helm gives charts that another one depends on a further value.
        assert list(one["properties"]) == ([*values] if at else ["global", *values])
        assert one["required"] == [*values]
