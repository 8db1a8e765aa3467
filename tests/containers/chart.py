"""What values make of the Helm chart, as differences to what its defaults make of it.

In `chart.json` each place that differs has both values; of what is not there, null.
"""

import json
import re
import tempfile
from pathlib import Path

import reducer
from tests.commands import run_command
from tests.containers.manifests import DOCKER, POOL, command, kustomized, read, yaml

CHART = DOCKER / "helm/reducer"
NAMESPACE = "reduction-server"
VALUES = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text())
DIFFERENT = VALUES["different"]


def of_the_docs():
    page = (DOCKER.parent / "docs/deployment.md").read_text().partition("\n### With Helm\n")[2]
    return yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])


# Values, and the name of the release.
CASES = {
    "different": (DIFFERENT, "reducer"),
    "host": (VALUES["host"], "reducer"),
    "docs": (of_the_docs(), "reducer"),
    "annotated": ({"podAnnotations": {"prometheus.io/scrape": "false"}}, "reducer"),
    "another release": ({"podMonitor": {"enabled": True}}, "other"),
}


def helm(*argv, values=None):
    """Run Helm, with values besides its arguments."""
    if values is None:
        return run_command(command("helm"), *argv)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(yaml.safe_dump(values))
        file.flush()
        return run_command(command("helm"), *argv, "--values", file.name)


def render(values=None, release="reducer", chart=CHART):
    """Return each resource that `helm template` prints, by its kind."""
    done = helm("template", release, chart, "--namespace", NAMESPACE, values=values)
    assert done.returncode == 0, done.stderr
    return by_kind(yaml.safe_load_all(done.stdout))


def by_kind(resources):
    resources = list(resources)
    assert len({resource["kind"] for resource in resources}) == len(resources)
    return {resource["kind"]: resource for resource in resources}


def leaves(value, path):
    """Return all that is in a resource, with the path to it."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from leaves(one, f"{path}/{key}")
    elif isinstance(value, list) and value:
        for index, one in enumerate(value):
            yield from leaves(one, f"{path}/{index}")
    else:
        yield path, value


def differences(one, other):
    """Return each place that two sets of resources do not share, with both values."""
    gone = {kind: ["all of it", None] for kind in one if kind not in other}
    first, second = (
        {path: value for kind, each in all_.items() for path, value in leaves(each, kind)}
        for all_ in (one, other)
    )
    # The rules are a file of their own.
    places = [path for path in {**first, **second} if not path.startswith("PrometheusRule/spec")]
    both = {place: [first.get(place), second.get(place)] for place in sorted(places)}
    found = {
        place: pair
        for place, pair in both.items()
        if pair[0] != pair[1] and place.partition("/")[0] not in gone
    }
    said = json.dumps(gone | found)
    for version in (read(CHART / "Chart.yaml")["version"], reducer.__version__):
        said = said.replace(version, "VERSION")
    return json.loads(said)


def written():
    """Return the text of `chart.json`: a line for each place."""
    cases = {"kustomization": differences(by_kind(kustomized(POOL)), render())}
    cases |= {name: differences(render(), render(*case)) for name, case in CASES.items()}
    lines = json.dumps(cases, indent=0)
    return re.sub(r"\[\n(.*),\n(.*)\n\]", r"[\1, \2]", lines) + "\n"
