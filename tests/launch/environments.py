"""What launchers set: `environments.yaml`, and the variables that describe a whole cluster."""

import json
from pathlib import Path

import yaml

TABLE = yaml.safe_load(Path(__file__).with_name("environments.yaml").read_text())
CLUSTERS = TABLE["clusters"]
AZURE_CLUSTER, TUNING_CLUSTER = CLUSTERS["azure"], CLUSTERS["tuning"]


def spec(cluster, kind, index, **task):
    """Return CLUSTER_SPEC or TF_CONFIG of one replica."""
    whole = {
        "cluster": cluster,
        "environment": "cloud",
        "job": {"scale_tier": "CUSTOM"},
        "task": {"type": kind, "index": index, **task},
    }
    return json.dumps(whole)


def vertex(pool, index, **task):
    """Return what Vertex AI sets in a replica: both variables."""
    cluster = CLUSTERS["vertex"]
    names = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps"}
    kind = ("chief", "worker", "ps", "evaluator")[pool]
    return {
        "CLUSTER_SPEC": spec(cluster, f"workerpool{pool}", index, **task),
        "TF_CONFIG": spec({names[task]: cluster[task] for task in names}, kind, index, **task),
    }


def variables(table):
    """Return the environment that a mapping of `environments.yaml` stands for."""
    found = {}
    for name, value in table.items():
        if name == "VERTEX":
            pool, index, *more = value
            found |= vertex(pool, index, **(more[0] if more else {}))
        elif isinstance(value, list):
            cluster, kind, index, *more = value
            cluster = CLUSTERS[cluster] if isinstance(cluster, str) else cluster
            found[name] = spec(cluster, kind, index, **(more[0] if more else {}))
        else:
            found[name] = json.dumps(value) if isinstance(value, dict) else str(value)
    return found


LAUNCHERS = {name: variables(table) for name, table in TABLE["launchers"].items()}
