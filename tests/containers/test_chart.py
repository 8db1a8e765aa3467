"""The Helm chart `docker/helm/reducer`, as Helm renders it.

It is held against the kustomization, against Kubernetes' schemas and against what a reducer takes.
"""

import json
import os
import re
import shutil
from subprocess import PIPE

import pytest

import reducer
from reducer.config import ReducerConfig
from reducer.wire.constants import MAX_LANES
from tests.commands import REDUCER, run_command, serving
from tests.containers.manifests import (
    DOCKER,
    KUBERNETES,
    OBSERVE,
    POOL,
    check_kubernetes,
    check_observed,
    command,
    kustomized,
    read,
    yaml,
)

CHART = DOCKER / "helm/reducer"
NAMESPACE = "reduction-server"
OPERATORS = {"PodMonitor", "PrometheusRule"}  # kinds that Prometheus' operator has
CPU = min(os.sched_getaffinity(0))
# One of each kind that a reducer's command takes.
SETTINGS = {
    "job_memory_limit": "512MiB",
    "max_connections": 1000000,
    "drain_timeout": "1.5s",
    "kernel": "generic",
    "cpus": str(CPU),
    "log_format": "json",
}
DIFFERENT = {
    "replicas": 3,
    "image": {"repository": "host:5000/reducer", "tag": "9.8.7", "pullSecrets": [{"name": "host"}]},
    "keysSecret": "other-keys",
    "memoryGiB": 2,
    "threads": 4,
    "settings": SETTINGS,
    "terminationGracePeriodSeconds": 60,
    "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "fast", "prometheus.io/port": "1"},
    "nodeSelector": {"pool": "reducers"},
    "tolerations": [{"key": "reducers", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "networkPolicy": {
        "workers": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "monitoring": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    },
    "podMonitor": {"enabled": True, "labels": {"release": "watch"}, "interval": "30s"},
    "prometheusRule": {"enabled": True, "labels": {"release": "watch"}},
}
OF_THE_HOST = {
    "hostNetwork": True,
    "networkPolicy": {"enabled": False},
    "resources": {"requests": {"cpu": 8, "memory": "64Gi"}},
    "image": {"digest": f"sha256:{'0123456789abcdef' * 4}"},
}
ALL = pytest.mark.parametrize(
    "values", [{}, DIFFERENT, OF_THE_HOST], ids=["defaults", "different", "host"]
)


@pytest.fixture(scope="module")
def helm(tmp_path_factory):
    """Helm's command, which takes `values` besides its arguments."""
    path = command("helm")

    def run(*argv, values=None):
        if values is None:
            return run_command(path, *argv)
        file = tmp_path_factory.mktemp("values") / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        return run_command(path, *argv, "--values", file)

    return run


@pytest.fixture(scope="module")
def render(helm):
    """Return what `helm template` prints."""

    def run(values=None, release="reducer", chart=CHART):
        done = helm("template", release, chart, "--namespace", NAMESPACE, values=values)
        assert done.returncode == 0, done.stderr
        return list(yaml.safe_load_all(done.stdout))

    return run


def by_kind(resources):
    assert len({resource["kind"] for resource in resources}) == len(resources)
    return {resource["kind"]: resource for resource in resources}


def pod_of(resources):
    return resources["StatefulSet"]["spec"]["template"]["spec"]


def leaves(value, path=""):
    """Return all that is in a resource, with the path to it."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from leaves(one, f"{path}/{key}")
    elif isinstance(value, list) and value:
        for index, one in enumerate(value):
            yield from leaves(one, f"{path}/{index}")
    else:
        yield path, value


# -- what it says ---------------------------------------------------------------------------------

LABELS = {
    "app.kubernetes.io/name": "reducer",
    "app.kubernetes.io/instance": "reducer",
    "app.kubernetes.io/version": reducer.__version__,
    "app.kubernetes.io/managed-by": "Helm",
    "helm.sh/chart": f"reducer-{read(CHART / 'Chart.yaml')['version']}",
}
# Where the chart differs from the kustomization, with what both have there, by the reason.
DIFFERENCES = {
    "Helm's objects have labels that say whose they are": {
        (kind, f"/metadata/labels/{label}"): (None, value)
        for kind in ("Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy")
        for label, value in LABELS.items()
        # The ServiceMonitor finds the Service by its name.
        if (kind, label) != ("Service", "app.kubernetes.io/name")
    },
    "two releases in a namespace are two pools": {
        (kind, f"/spec/{selector}/app.kubernetes.io/instance"): (None, "reducer")
        for kind, selector in (
            ("Service", "selector"),
            ("StatefulSet", "selector/matchLabels"),
            ("StatefulSet", "template/metadata/labels"),
            ("PodDisruptionBudget", "selector/matchLabels"),
            ("NetworkPolicy", "podSelector/matchLabels"),
        )
    },
    "a value says how many threads there are, and so which ports": {
        ("StatefulSet", "/spec/template/spec/containers/0/args/5"): (None, "--threads=1"),
        ("NetworkPolicy", "/spec/ingress/0/ports/0/endPort"): (5570, 5555),
    },
    "`helm install --create-namespace` makes the namespace": {
        ("Namespace", path): (value, None) for path, value in leaves(read(POOL / "namespace.yaml"))
    },
}


def test_it_says_what_the_kustomization_says(render):
    theirs, ours = (
        {(kind, path): value for kind, one in by_kind(all_).items() for path, value in leaves(one)}
        for all_ in (kustomized(POOL), render())
    )
    assert len(theirs) > 80
    assert {
        place: (theirs.get(place), ours.get(place))
        for place in theirs.keys() | ours.keys()
        if theirs.get(place) != ours.get(place)
    } == {place: pair for pairs in DIFFERENCES.values() for place, pair in pairs.items()}


def test_its_defaults_are_the_reducers():
    values = read(CHART / "values.yaml")
    fields = ReducerConfig.model_fields
    assert values["threads"] == fields["threads"].default
    assert values["memoryGiB"] * 2**30 == fields["memory_limit"].default
    assert values["terminationGracePeriodSeconds"] > fields["drain_timeout"].default
    assert read(CHART / "Chart.yaml")["kubeVersion"] == f">={KUBERNETES}-0"


@ALL
def test_kubernetes_and_the_operator_take_it(values, render):
    for resource in render(values):
        (check_observed if resource["kind"] in OPERATORS else check_kubernetes)(resource)


def test_the_operators_schema_knows_a_misspelt_field(render):
    monitor = by_kind(render(DIFFERENT))["PodMonitor"]
    monitor["spec"]["podMetricsEndpoints"][0]["ports"] = "http"
    with pytest.raises(ValueError, match="ports"):
        check_observed(monitor)


@ALL
def test_lint_has_nothing_to_say(values, helm):
    done = helm("lint", "--strict", CHART, values=values)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@ALL
def test_no_value_gives_a_reducer_rights(values, render):
    pod = pod_of(by_kind(render(values)))
    theirs = read(POOL / "statefulset.yaml")["spec"]["template"]["spec"]
    assert pod["securityContext"] == theirs["securityContext"]
    assert pod["automountServiceAccountToken"] is False
    (container,), (same,) = pod["containers"], theirs["containers"]
    assert container["securityContext"] == same["securityContext"]
    assert container["volumeMounts"] == same["volumeMounts"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe] == same[probe]


def test_values_arrive(render):
    found = by_kind(render(DIFFERENT))
    assert found["StatefulSet"]["spec"]["replicas"] == 3
    pod = pod_of(found)
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert pod[name] == DIFFERENT[name]
    assert pod["terminationGracePeriodSeconds"] == 60
    assert pod["imagePullSecrets"] == [{"name": "host"}]
    assert pod["volumes"][0]["secret"]["secretName"] == "other-keys"
    (container,) = pod["containers"]
    assert container["image"] == "host:5000/reducer:9.8.7"
    assert container["resources"] == {
        "requests": {"cpu": "5", "memory": "3Gi"},
        "limits": {"memory": "4Gi"},
    }
    workers, monitoring = found["NetworkPolicy"]["spec"]["ingress"]
    assert workers == {
        "from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "ports": [{"protocol": "TCP", "port": 5555, "endPort": 5558}],
    }
    assert monitoring["from"] == [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    # The PodMonitor looks at the pods, so that nothing else has to.
    annotations = found["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations == DIFFERENT["podAnnotations"]


def test_the_values_in_the_docs(render):
    page = (DOCKER.parent / "docs/deployment.md").read_text().partition("\n### With Helm\n")[2]
    (text,) = re.findall("```yaml\n(.*?)```", page.partition("\n## ")[0], re.DOTALL)
    found = by_kind(render(yaml.safe_load(text)))
    assert set(found) > OPERATORS
    assert found["StatefulSet"]["spec"]["replicas"] == 4
    (container,) = pod_of(found)["containers"]
    assert container["resources"]["requests"] == {"cpu": "5", "memory": "33Gi"}
    assert container["args"][-2:] == ["--drain-timeout=30s", "--job-memory-limit=8GiB"]


def test_values_for_a_nodes_own_network(render):
    found = by_kind(render(OF_THE_HOST))
    assert "NetworkPolicy" not in found
    pod = pod_of(found)
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    (container,) = pod["containers"]
    assert container["image"] == f"REGISTRY/reducer@{OF_THE_HOST['image']['digest']}"
    assert container["resources"] == OF_THE_HOST["resources"]


def test_an_annotation_beats_the_charts(render):
    given = {"podAnnotations": {"prometheus.io/scrape": "false"}}
    template = by_kind(render(given))["StatefulSet"]["spec"]["template"]
    expected = {"prometheus.io/scrape": "false", "prometheus.io/port": "9090"}
    assert template["metadata"]["annotations"] == expected


def test_a_reducer_takes_its_arguments(render, tmp_path):
    """All settings that are on, with this machine's addresses and keys in place of a pod's."""
    (container,) = pod_of(by_kind(render(DIFFERENT)))["containers"]
    serve, *options = container["args"]
    assert serve == "serve"
    of_pod = ("--bind=tcp://0.0.0.0:5555", "--http=0.0.0.0:9090", "--keys=/keys")
    assert set(of_pod) <= set(options)
    keys = tmp_path / "keys"
    run_command(*REDUCER, "keygen", keys, "--job", "train").check_returncode()
    given = [option for option in options if option not in of_pod]
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


def test_the_operator_watches_what_it_does_beside_the_kustomization(render):
    values = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    found = by_kind(render(values, "fast"))
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


def test_what_is_watched_has_the_labels_that_an_operator_asks_for(render):
    found = by_kind(render(DIFFERENT))
    for kind in OPERATORS:
        assert found[kind]["metadata"]["labels"]["release"] == "watch"
    (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["interval"] == "30s"


# -- releases -------------------------------------------------------------------------------------


def test_the_notes_name_the_reducers(helm):
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


def test_two_releases_in_a_namespace_are_two_pools(render):
    first, second = (by_kind(render(DIFFERENT, release)) for release in ("reducer", "other"))
    for kind, one in first.items():
        assert one["metadata"]["name"] == "reducer"
        assert second[kind]["metadata"]["name"] == "other-reducer"
    labels = second["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        for resources, finds in ((first, False), (second, True)):
            spec = resources[kind]["spec"]
            selector = spec.get("selector") or spec["podSelector"]
            asked = selector.get("matchLabels", selector)
            assert (asked.items() <= labels.items()) is finds, kind


def test_a_long_name_leaves_room_for_what_kubernetes_adds(render):
    found = by_kind(render(release="r" * 53))  # Helm takes no longer one
    assert len(found["StatefulSet"]["metadata"]["name"]) <= 63 - len("-5d8c7b9f4d")


def test_a_package_of_it_renders_the_same(helm, render, tmp_path):
    version = read(CHART / "Chart.yaml")["version"]
    helm("package", CHART, "--destination", tmp_path).check_returncode()
    package = tmp_path / f"reducer-{version}.tgz"
    assert render(DIFFERENT, chart=package) == render(DIFFERENT)


def test_another_chart_may_depend_on_it(render, tmp_path):
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
    found = by_kind(render(values, "train", chart=tmp_path))
    assert found["StatefulSet"]["spec"]["replicas"] == 5
    assert found["StatefulSet"]["metadata"]["name"] == "train-reducer"


# -- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 3}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "3"}, "replicas"),
        ({"image": {"tags": "1"}}, "tags"),
        ({"image": {"tag": "latest"}}, "image.tag: name a version"),
        ({"image": {"digest": "0123"}}, "digest"),
        ({"keysSecret": ""}, "keysSecret"),
        ({"threads": MAX_LANES + 1}, "threads"),
        ({"settings": {"max_job": 3}}, "max_job"),
        ({"settings": {"insecure": True}}, "insecure"),
        ({"settings": {"kernel": "sse"}}, "kernel"),
        ({"settings": {"drain_timeout": 8}}, "drain_timeout"),
        ({"settings": {"job_memory_limit": "4Gi"}}, "job_memory_limit"),
        ({"securityContext": {"runAsUser": 0}}, "securityContext"),
        ({"podAnnotations": None}, "podAnnotations"),
        ({"podMonitor": {"interval": "15"}}, "interval"),
        # Without any peer a NetworkPolicy lets in everybody.
        ({"networkPolicy": {"workers": []}}, "workers"),
        ({"networkPolicy": {"monitoring": [{}]}}, "monitoring"),
        ({"hostNetwork": True}, "networkPolicy.enabled to false"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(values, named, helm):
    done = helm("template", "reducer", CHART, values=values)
    assert done.returncode != 0
    assert re.search(rf"\b{re.escape(named)}\b", done.stderr), done.stderr
    assert done.stdout == ""


def test_an_older_kubernetes_is_refused(helm):
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
