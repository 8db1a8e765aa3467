"""Makes Kubernetes' PrometheusRule of the alerts in `reducers.rules.yaml`, their only source."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

RULES = Path(__file__).parent / "reducers.rules.yaml"
RESOURCE = RULES.parents[1] / "kubernetes/observe/prometheusrule.yaml"
HEAD = """\
# Made of docker/prometheus/reducers.rules.yaml by docker/prometheus/make_prometheusrule.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: reducer
spec:
"""


def resource() -> str:
    """Return the resource's text."""
    rules = RULES.read_text()
    return HEAD + indent(rules[rules.index("groups:") :], "  ")


if __name__ == "__main__":
    RESOURCE.write_text(resource())
