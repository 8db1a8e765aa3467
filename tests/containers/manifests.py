"""Resources of `docker/` as they are sent to Kubernetes, and the schemas that judge them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs the extra `manifests`")

DOCKER = Path(__file__).parent.parent.parent / "docker"
POOL = DOCKER / "kubernetes/pool"
OBSERVE = DOCKER / "kubernetes/observe"
KUBERNETES = "1.31.0"  # the oldest that is looked after; later ones take what it takes


def read(path):
    return yaml.safe_load((DOCKER / path).read_text())


def check_kubernetes(resource):
    """Validate a resource strictly: an unknown field is an error."""
    judge = pytest.importorskip("kubernetes_validate", reason="needs the extra `manifests`")
    judge.validate(resource, KUBERNETES, strict=True)


def check_observed(resource):
    """Validate one that Prometheus' operator, or Grafana's sidecar, looks for."""
    if resource["kind"] == "ConfigMap":
        check_kubernetes(resource)
        return
    models = pytest.importorskip(
        "cloudcoil.models.prometheus_operator.v1", reason="needs the extra `manifests`"
    )
    model = getattr(models, resource["kind"])
    model.model_validate(resource, extra="forbid", by_alias=True)


def command(name):
    """Return the path of `helm` or `kubectl`, or skip where there is none."""
    path = shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent)
    if path is None:
        pytest.skip(f"there is no `{name}`: `make kubernetes-tools` installs it on x86-64")
    return path


def kustomized(folder):
    """Return the resources that `kubectl apply -k` sends."""
    argv = [command("kubectl"), "kustomize", folder]
    done = subprocess.run(argv, capture_output=True, check=True)
    return list(yaml.safe_load_all(done.stdout))
