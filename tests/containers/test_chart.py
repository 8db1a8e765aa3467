"""The Helm chart `docker/helm/reducer`, as Helm renders it.

It is held against the kustomization, against Kubernetes' schemas and against what a reducer takes.
"""

import json
import os
import re
import shutil
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
    by_kind,
    helm,
    render,
    written,
)
from tests.containers.manifests import (
    KUBERNETES,
    OBSERVE,
    check_kubernetes,
    check_observed,
    read,
    yaml,
)
from tests.golden import check_golden

OPERATORS = {"PodMonitor", "PrometheusRule"}  # kinds that Prometheus' operator has
CPU = min(os.sched_getaffinity(0))


def pod_of(resources):
    return resources["StatefulSet"]["spec"]["template"]["spec"]


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
    for resource in render(*CASES[name]).values():
        (check_observed if resource["kind"] in OPERATORS else check_kubernetes)(resource)


def test_the_operators_schema_knows_a_misspelt_field():
    monitor = render(DIFFERENT)["PodMonitor"]
    monitor["spec"]["podMetricsEndpoints"][0]["ports"] = "http"
    with pytest.raises(ValueError, match="ports"):
        check_observed(monitor)


def test_a_reducer_takes_its_arguments(tmp_path):
    """All settings that are on, with this machine's addresses and keys in place of a pod's."""
    (container,) = pod_of(render(DIFFERENT))["containers"]
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


# -- what is watched ------------------------------------------------------------------------------


def test_the_operator_watches_what_it_does_beside_the_kustomization():
    values = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    found = render(values, "fast")
    monitor, rule = found["PodMonitor"]["spec"], found["PrometheusRule"]["spec"]
    assert (
        monitor["podMetricsEndpoints"] == read(OBSERVE / "servicemonitor.yaml")["spec"]["endpoints"]
    )
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"] == labels
    ports = [port["name"] for port in pod_of(found)["containers"][0]["ports"]]
    assert monitor["podMetricsEndpoints"][0]["port"] in ports
    assert rule == read("prometheus/reducers.rules.yaml")
    # The scrape job that ReducerDown asks for is the value of this label.
    (down,) = (each for each in rule["groups"][0]["rules"] if each["alert"] == "ReducerDown")
    assert f'up{{job="{labels[monitor["jobLabel"]]}"}} == 0' in down["expr"]


# -- releases -------------------------------------------------------------------------------------


def test_the_notes_name_the_reducers():
    arguments = ("--namespace", NAMESPACE, "--dry-run=client")
    done = helm("install", "fast", CHART, *arguments, values={"replicas": 3})
    if "cluster unreachable" in done.stderr:
        pytest.skip("Helm 3 asks a cluster before it prints notes")
    assert done.returncode == 0, done.stderr
    text, _, notes = done.stdout.partition("\nNOTES:\n")
    resources = [one for one in yaml.safe_load_all(text.partition("MANIFEST:\n")[2]) if one]
    found = by_kind(resources)
    name, service = found["StatefulSet"]["metadata"]["name"], found["Service"]
    assert found["StatefulSet"]["spec"]["serviceName"] == service["metadata"]["name"]
    (port,) = (port["port"] for port in service["spec"]["ports"] if port["name"] == "data")
    hosts = [f"{name}-{index}.{service['metadata']['name']}.{NAMESPACE}" for index in range(3)]
    servers = ",".join(f"{host}:{port}" for host in hosts)
    assert f"    REDUCTION_SERVERS={servers}\n" in f"{notes}\n"
    assert "create secret generic reducer-keys --from-file=keys/pool" in notes
    assert 'reduction-server/worker: "true"' in notes
    assert "image.repository is not set" in notes


def test_a_long_name_leaves_room_for_what_kubernetes_adds():
    found = render(release="r" * 53)  # Helm takes no longer one
    assert len(found["StatefulSet"]["metadata"]["name"]) <= 63 - len("-5d8c7b9f4d")


def test_a_package_of_it_renders_the_same(tmp_path):
    version = read(CHART / "Chart.yaml")["version"]
    helm("package", CHART, "--destination", tmp_path).check_returncode()
    package = tmp_path / f"reducer-{version}.tgz"
    assert render(DIFFERENT, chart=package) == render(DIFFERENT)


def test_another_chart_may_depend_on_it(tmp_path):
    """It gets values from the other one, and what Helm calls global."""
    (tmp_path / "Chart.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v2",
                "name": "cluster",
                "version": "1.2.3",
                "dependencies": [{"name": "reducer", "version": "*"}],
            }
        )
    )
    shutil.copytree(CHART, tmp_path / "charts/reducer")
    values = {"global": {"team": "vision"}, "reducer": {"replicas": 5}}
    found = render(values, "train", chart=tmp_path)
    assert found["StatefulSet"]["spec"]["replicas"] == 5
    assert found["StatefulSet"]["metadata"]["name"] == "train-reducer"


# -- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"), [*VALUES["refused"], ({"threads": MAX_LANES + 1}, "threads")], ids=str
)
def test_what_is_wrong_is_named(values, named):
    done = helm("template", "reducer", CHART, values=values)
    assert done.returncode != 0
    assert re.search(rf"\b{re.escape(named)}\b", done.stderr), done.stderr
    assert done.stdout == ""


def test_an_older_kubernetes_is_refused():
    done = helm("template", "reducer", CHART, "--kube-version", "1.30.9")
    assert done.returncode != 0
    assert KUBERNETES in done.stderr


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
    for one, values in found:
        assert one["additionalProperties"] is False
        assert list(one["properties"]) in ([*values], ["global", *values])
        assert one["required"] == [*values]
