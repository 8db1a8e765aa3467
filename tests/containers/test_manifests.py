"""What `docker/` gives to other systems, judged offline by these systems' own schemas.

The schemas come in packages: Kubernetes' own in `kubernetes-validate`, JobSet's and the Trainer's
in `kubeflow-trainer-api`, those of Prometheus' operator in `cloudcoil-models-prometheus-operator`,
Grafana's in `grafana-foundation-sdk`, Compose's in `compose-spec`, Vertex AI's and Azure ML's in
their clients.
"""

import json
import re
import runpy
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

import reducer
from tests.containers.chart import leaves
from tests.containers.manifests import (
    DOCKER,
    OBSERVE,
    POOL,
    check_kubernetes,
    check_observed,
    kustomized,
    read,
)


def check_model(name, resource):
    """Validate one of JobSet's or the Trainer's, and each job in it as Kubernetes does."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs `manifests`")
    spec = resource["spec"]
    for job in (spec if "replicatedJobs" in spec else spec["template"]["spec"])["replicatedJobs"]:
        template = job["template"]["spec"]["template"]
        # The Trainer's own controller gives its nodes this.
        template["spec"].setdefault("restartPolicy", "Never")
        described = {"metadata": {"name": job["name"]}, "spec": job["template"]["spec"]}
        check_kubernetes({"apiVersion": "batch/v1", "kind": "Job", **described})
        # These models know no quantity, nor a port that has a name.
        template["spec"] = {"containers": [{"name": job["name"]}]}
    getattr(models, name).model_validate(resource, extra="forbid", by_alias=True)


def pods():
    """Return every pod that runs a reducer or a worker, with the file that it is in."""
    jobset, runtime = "kubernetes/job/jobset.yaml", "kubernetes/kubeflow/runtime.yaml"
    specs = {jobset: read(jobset)["spec"], runtime: read(runtime)["spec"]["template"]["spec"]}
    found = [("pool", read("kubernetes/pool/statefulset.yaml"))]
    found += [(path, job["template"]) for path in specs for job in specs[path]["replicatedJobs"]]
    return [(path, template["spec"]["template"]["spec"]) for path, template in found]


def check_trainjob(resource):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs `manifests`")
    models.TrainerV1alpha1TrainJob.model_validate(resource, extra="forbid", by_alias=True)


def check_compose(project):
    models = pytest.importorskip("compose_spec.models", reason="needs the extra `manifests`")
    known = {name: value for name, value in project.items() if not name.startswith("x-")}
    models.ComposeSpecification.model_validate(known, extra="forbid")


@pytest.mark.parametrize(
    ("judge", "path"),
    [
        *((check_kubernetes, path) for path in POOL.glob("*.yaml") if path.stem != "kustomization"),
        (check_observed, OBSERVE / "servicemonitor.yaml"),
        (check_observed, OBSERVE / "prometheusrule.yaml"),
        (partial(check_model, "JobsetV1alpha2JobSet"), "kubernetes/job/jobset.yaml"),
        (
            partial(check_model, "TrainerV1alpha1ClusterTrainingRuntime"),
            "kubernetes/kubeflow/runtime.yaml",
        ),
        (check_trainjob, "kubernetes/kubeflow/trainjob.yaml"),
        (check_trainjob, "kubernetes/kubeflow/trainjob-shared-pool.yaml"),
        (check_compose, "compose.yaml"),
    ],
    ids=lambda value: "judge" if callable(value) else Path(value).stem,
)
def test_its_judge_takes_it_and_knows_a_misspelt_field(judge, path):
    judge(read(path))
    misspelt = read(path)
    part = misspelt["services"]["worker-0"] if "services" in misspelt else misspelt
    part.get("spec", part)["misspelt"] = {}
    with pytest.raises(Exception, match="misspelt"):
        judge(misspelt)


def test_the_shared_pool_as_kustomize_prints_it():
    resources = kustomized(POOL)
    listed = read(POOL / "kustomization.yaml")["resources"]
    assert len(resources) == len(listed)
    assert sorted(path.name for path in POOL.iterdir()) == sorted([*listed, "kustomization.yaml"])
    for resource in resources:
        check_kubernetes(resource)
    (image,) = re.findall(r"'image': '(\S+)'", str(resources))
    assert image == f"REGISTRY/reducer:{reducer.__version__}"


def test_what_observes_the_pool_as_kustomize_prints_it():
    resources = {resource["kind"]: resource for resource in kustomized(OBSERVE)}
    assert set(resources) == {"ServiceMonitor", "PrometheusRule", "ConfigMap"}
    for resource in resources.values():
        check_observed(resource)
    pool = read(POOL / "namespace.yaml")["metadata"]["name"]
    assert {resource["metadata"]["namespace"] for resource in resources.values()} == {pool}
    dashboards = resources["ConfigMap"]
    assert dashboards["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert dashboards["data"] == {"reducers.json": (DOCKER / "grafana/reducers.json").read_text()}


def test_the_dashboard():
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="needs the extra `manifests`"
    )
    from grafana_foundation_sdk.cog import encoder, plugins  # noqa: PLC0415 (it is there)

    plugins.register_default_plugins()  # so that it knows what kinds of panels there are

    dashboard = json.loads((DOCKER / "grafana/reducers.json").read_text())
    dashboard["panels"][1]["options"]["colourMode"] = "value"  # misspelt
    made = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(dashboard)))
    known, ours = dict(leaves(made, "")), leaves(dashboard, "")
    lost = [at for at, value in ours if value not in ({}, []) and known.get(at) != value]
    assert lost == ["/panels/1/options/colourMode"]


@pytest.mark.timeout(300)  # the client is large
def test_vertex():
    types = pytest.importorskip("google.cloud.aiplatform_v1.types", reason="needs `clouds`")
    json_format = pytest.importorskip("google.protobuf.json_format", reason="needs `clouds`")
    spec = read("vertex/custom-job.yaml")
    parsed = json_format.ParseDict(spec, types.CustomJobSpec.pb()())
    assert [pool.replica_count for pool in parsed.worker_pool_specs] == [1, 7, 8]
    commands = {tuple(pool.container_spec.command) for pool in parsed.worker_pool_specs}
    assert len(commands) == 1  # the roles differ, and nothing else


@pytest.mark.timeout(300)  # the client is large
@pytest.mark.filterwarnings("ignore")  # its own, about its dependencies
def test_azure(tmp_path):
    client = pytest.importorskip("azure.ai.ml", reason="needs the extra `clouds`")
    (tmp_path / "src").mkdir()  # a user's own, whose existence the client checks
    job = client.load_job(shutil.copy(DOCKER / "azureml/job.yml", tmp_path))
    assert job.distribution.type == "pytorch"
    assert job.resources.instance_count == 4


def test_slurm():
    subprocess.run(["bash", "-n", DOCKER / "slurm/train.sbatch"], check=True)


def test_every_pod_runs_without_rights_and_probes_ask_where_reducers_answer():
    found = [(path, pod, *pod["containers"]) for path, pod in pods()]
    assert [container["name"] for *_, container in found].count("reducer") == 3
    assert len(found) == 5
    for path, pod, container in found:
        assert pod["securityContext"]["runAsNonRoot"] is True, path
        assert pod["automountServiceAccountToken"] is False, path
        if container["name"] == "reducer":
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True, path
            assert rights["allowPrivilegeEscalation"] is False, path
            assert rights["capabilities"] == {"drop": ["ALL"]}, path
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            (keys,) = container["volumeMounts"]
            given = [f"--bind=tcp://0.0.0.0:{ports['data']}", f"--http=0.0.0.0:{ports['http']}"]
            assert {*given, f"--keys={keys['mountPath']}"} <= set(container["args"])
            assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
            assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}


def test_workers_of_a_jobset_know_its_reducers_and_the_trainers_job_its_runtime_by_name():
    jobset = read("kubernetes/job/jobset.yaml")
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    reducers, workers = spec["replicatedJobs"]
    addresses = [
        f"{name}-{reducers['name']}-0-{index}.{spec['network']['subdomain']}:5555"
        for index in range(reducers["template"]["spec"]["completions"])
    ]
    (container,) = workers["template"]["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["REDUCTION_SERVERS"].split(",") == addresses
    assert int(env["PET_NNODES"]) == workers["template"]["spec"]["completions"]
    runtime = read("kubernetes/kubeflow/runtime.yaml")["metadata"]["name"]
    assert read("kubernetes/kubeflow/trainjob.yaml")["spec"]["runtimeRef"]["name"] == runtime


def test_a_trainers_job_knows_the_shared_pool_and_may_reach_it():
    job, pool = (
        read("kubernetes/kubeflow/trainjob-shared-pool.yaml")["spec"],
        read(POOL / "statefulset.yaml"),
    )
    trainer, service = job["trainer"], pool["spec"]["serviceName"]
    env = {entry["name"]: entry["value"] for entry in trainer["env"]}
    namespace = read(POOL / "namespace.yaml")["metadata"]["name"]
    assert env["REDUCTION_SERVERS"].split(",") == [
        f"{pool['metadata']['name']}-{index}.{service}.{namespace}:5555"
        for index in range(pool["spec"]["replicas"])
    ]
    (patch,) = job["runtimePatches"]
    (nodes,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patched = nodes["template"]["spec"]["template"]
    (peer,) = read(POOL / "networkpolicy.yaml")["spec"]["ingress"][0]["from"]
    assert peer["podSelector"]["matchLabels"] == patched["metadata"]["labels"]
    (container,) = patched["spec"]["containers"]
    assert container["volumeMounts"][0]["mountPath"] == env["REDUCTION_KEYS"]
    # What becomes of Kubeflow's own runtime, which names a container and an image.
    container |= {name: trainer[name] for name in ("image", "command", "env")}
    check_kubernetes({"apiVersion": "v1", "kind": "Pod", **patched})


def test_the_monitor_finds_the_pool():
    monitor, service = read(OBSERVE / "servicemonitor.yaml"), read(POOL / "service.yaml")
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    (endpoint,) = monitor["spec"]["endpoints"]
    assert ports[endpoint["port"]] == 9090
    # A scrape job is called as the service is; ReducerDown asks for that name.
    (scraped,) = read("prometheus/prometheus.yaml")["scrape_configs"]
    assert scraped["job_name"] == service["metadata"]["name"]
    assert f'up{{job="{scraped["job_name"]}"}}' in (OBSERVE / "prometheusrule.yaml").read_text()


def test_kubernetes_has_the_alerts_that_prometheus_has():
    made = runpy.run_path(str(DOCKER / "prometheus/make_prometheusrule.py"))["made"]()
    stale = [str(path) for path, text in made.items() if path.read_text() != text]
    assert stale == [], "run: python3 docker/prometheus/make_prometheusrule.py"
    rules = read("prometheus/reducers.rules.yaml")
    assert read("kubernetes/observe/prometheusrule.yaml")["spec"] == rules
    assert read("helm/reducer/reducers.rules.yaml") == rules


def test_compose_observes_its_reducers():
    services = read("compose.yaml")["services"]
    observers = {name: service for name, service in services.items() if "profiles" in service}
    assert set(observers) == {"prometheus", "grafana"}
    mounted = {}
    for service in observers.values():
        assert service["profiles"] == ["observe"]
        assert re.search(r":v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        # A network that leads nowhere has no ports for this machine either.
        assert not set(service["networks"]) <= {"training"}
        for volume in service["volumes"]:
            source, target, rights = volume.split(":")
            assert rights == "ro"
            mounted[target] = DOCKER / source
    assert "--config.file=/etc/prometheus/prometheus.yaml" in services["prometheus"]["command"]
    (scraped,) = read(mounted["/etc/prometheus"] / "prometheus.yaml")["scrape_configs"]
    (static,) = scraped["static_configs"]
    assert static["targets"] == [f"{name}:9090" for name in services if name.startswith("reducer")]
    provisioning = mounted["/etc/grafana/provisioning"]
    (provider,) = read(provisioning / "dashboards/reducers.yaml")["providers"]
    (source,) = read(provisioning / "datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert set(services["grafana"]["networks"]) & set(services["prometheus"]["networks"])
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted[home] == DOCKER / "grafana/reducers.json"
    assert str(Path(home).parent) == provider["options"]["path"]
