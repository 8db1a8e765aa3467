"""Makes of the alerts in `reducers.rules.yaml`, their only source, what Kubernetes gets.

That is the PrometheusRule beside the kustomization, and a copy in the Helm chart, which can read
its own files alone.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

RULES = Path(__file__).parent / "reducers.rules.yaml"
DOCKER = RULES.parents[1]
HEAD = """\
# Made of docker/prometheus/reducers.rules.yaml by docker/prometheus/make_prometheusrule.py.
"""
RESOURCE = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: reducer
spec:
"""


def made() -> dict[Path, str]:
    """Return the files' texts, by path."""
    rules = RULES.read_text()
    groups = rules[rules.index("groups:") :]
    return {
        DOCKER / "kubernetes/observe/prometheusrule.yaml": HEAD + RESOURCE + indent(groups, "  "),
        DOCKER / "helm/reducer/reducers.rules.yaml": HEAD + groups,
    }


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text)
