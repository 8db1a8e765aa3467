"""The dashboard and the alerts of `docker/`: what they ask for is what reducers tell.

Prometheus itself is Debian's package, and so is `promtool`; nothing here uses its service.
"""

import json
import math
import re
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.commands import free_ports, run_command, serving
from tests.conftest import joined
from tests.ranks import environments, ranks
from tests.reducer.asked import ask
from tests.waits import eventually

yaml = pytest.importorskip("yaml", reason="needs the extra `dev`")

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/reducers.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
RULES = DOCKER / "prometheus/reducers.rules.yaml"
RULES_TESTS = DOCKER / "prometheus/reducers.tests.yaml"
CONFIG = DOCKER / "prometheus/prometheus.yaml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"up", "instance", "job", "exported_job"}  # not told by a reducer

RANKS, LATE_RANK, LATE_S = 4, 2, 0.03
NAMED_S = 90.0  # a machine of two cores runs all of it
LOOK_S = 0.2


def queries():
    """Return every query of the dashboard, and the panel that it is of."""
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def substituted(query, **others):
    """Return a query as Grafana sends it when all of each variable is chosen."""
    for name, value in {"__rate_interval": "15s", "instance": ".*", "job": ".*", **others}.items():
        query = query.replace(f"${name}", value)
    assert "$" not in query
    return query


def test_every_metric_and_label_is_one_that_a_reducer_tells():
    families, waits = [], {}

    def waited():
        families[:] = text_string_to_metric_families(ask(reducer.http, "/metrics").text)
        for sample in (sample for each in families for sample in each.samples):
            if sample.labels == {"cause": "late", "job": "told", "rank": "1"}:
                waits[sample.name] = sample.value
        return waits.get("reducer_job_rank_waited_seconds_total", 0) >= 5 * 0.02

    with serving("--http", 0) as reducer, joined(2, servers=reducer.address, job="told") as clients:
        for _ in range(10):  # of the second rank the others' waits are told
            first = clients[0].all_reduce(np.ones(64, np.float32))
            time.sleep(0.02)
            for work in (clients[1].all_reduce(np.ones(64, np.float32)), first):
                work.wait(20)
        eventually(waited)
    assert 5 <= waits["reducer_job_rank_waits_total"] <= 12
    told = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in families
        for sample in family.samples
    }
    for way in ("in", "out"):  # the job is the only one, and the reducer has one thread
        moved = told[f"reducer_job_bytes_{way}_total", None]
        assert moved == told[f"reducer_bytes_{way}_total", None] >= 10 * 2 * 64 * 4
    times = "reducer_job_all_reduce_seconds"
    number, seconds = (told[f"{times}_{of}", None] for of in ("count", "sum"))
    assert 9 <= number <= 10
    assert seconds >= 5 * 0.02
    buckets = [value for (name, le), value in told.items() if name.endswith("_bucket") and le]
    assert buckets == sorted(buckets)
    assert buckets[-1] == number
    assert told[f"{times}_bucket", str(2**12 / 1e6)] < 5  # 4 ms
    names = {family.name for family in families} | {name for name, _ in told}
    labels = {label for each in families for sample in each.samples for label in sample.labels}
    asked = [query for _, query in queries()] + [alert["expr"] for alert in ALERTS]
    asked += [VARIABLES[name]["query"]["query"] for name in ("instance", "job")]
    for query in asked:
        metrics = set(re.findall(r"\b(?:reducer|process)_\w+\b", query))
        assert metrics or query.startswith("up")
        assert metrics <= names, query
        said = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', query)
        for together in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            said += together.split(", ")
        assert set(said) <= labels | OF_PROMETHEUS, query


def test_the_dashboard_can_be_imported_beside_others():
    every = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert "id" not in DASHBOARD  # that is another one in every Grafana
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert [VARIABLES[name]["datasource"] for name in ("instance", "job")] == [source] * 2
    for panel in PANELS:
        assert panel["datasource"] == source
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for target in panel["targets"]:
            assert target["datasource"] == source
            said = set(re.findall(r"\$(\w+)", target["expr"]))
            assert said <= {*VARIABLES, "__rate_interval"}


def test_every_alert_says_what_to_do_and_is_tested_both_ways():
    tests = yaml.safe_load(RULES_TESTS.read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for alert in ALERTS:
        assert set(alert["annotations"]) == {"summary", "description"}
        assert alert["labels"]["severity"] in {"critical", "warning"}
        fires = {bool(each["exp_alerts"]) for each in cases if each["alertname"] == alert["alert"]}
        assert fires == {True, False}, alert["alert"]


@pytest.mark.parametrize(("verb", "file"), [("test rules", RULES_TESTS), ("check config", CONFIG)])
def test_promtool_accepts(verb, file):
    if not shutil.which("promtool"):
        pytest.skip("there is no `promtool`: make test-tools")
    done = run_command("promtool", *verb.split(), file)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus(NamedTuple):
    """A Prometheus that answers."""

    address: str

    def ask(self, path, **parameters):
        """Return what a path of its API answers."""
        found = ask(self.address, f"/api/v1/{path}?{urlencode(parameters)}").json
        assert found["status"] == "success"
        return found["data"]

    def query(self, query, **at):
        """Return the labels and the value of each series that a query has, now or at a `time`."""
        found = self.ask("query", query=query, **at)["result"]
        series = [(each["metric"], float(each["value"][1])) for each in found]
        return sorted(series, key=lambda one: sorted(one[0].items()))

    def alerts(self):
        """Return the labels of all alerts, pending or firing."""
        return [each["labels"] for each in self.ask("alerts")["alerts"]]


@contextmanager
def prometheus(folder, targets):
    """The Prometheus of `docker/prometheus`, with other targets, which looks every second."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES.parent / name) for name in config["rule_files"]]
    (scraped,) = config["scrape_configs"]
    scraped["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    said = folder / "prometheus.log"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (
        said.open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            in_time(lambda: process.poll() is not None or "ready to receive" in said.read_text())
            assert process.poll() is None, said.read_text()
            yield Prometheus(f"127.0.0.1:{port}")
        finally:
            process.kill()


def in_time(condition):
    """Wait until something is so, and leave the processors to others meanwhile."""
    eventually(lambda: condition() or time.sleep(LOOK_S), NAMED_S)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A job with a rank that comes late, its two reducers, and a Prometheus that names it."""
    if not shutil.which("prometheus"):
        pytest.skip("there is no `prometheus`: make test-tools")
    with ExitStack() as stack:
        pool = [stack.enter_context(serving("--http", 0)) for _ in range(2)]
        servers = [reducer.address for reducer in pool]
        settings = {"REDUCTION_JOB": "steps", f"LATE_{LATE_RANK}": f"{LATE_S}"}
        job = environments(RANKS, servers, **settings)
        stack.enter_context(ranks(job, "-m", "tests.lab.straggling_rank"))
        folder = tmp_path_factory.mktemp("prometheus")
        its = stack.enter_context(prometheus(folder, [reducer.http for reducer in pool]))
        named = f'reducer_job_straggler_share{{rank="{LATE_RANK}", cause="late"}}'
        in_time(lambda: len(its.query(named)) == len(pool))
        yield its, pool


@pytest.mark.extended("test_every_metric_and_label_is_one_that_a_reducer_tells")
def test_every_query_of_the_dashboard_has_an_answer(watched):
    its, pool = watched
    addresses = sorted(reducer.http for reducer in pool)
    assert its.ask("label/instance/values", **{"match[]": "reducer_serving"}) == addresses
    jobs = its.ask("label/exported_job/values", **{"match[]": "reducer_job_ranks"})
    assert jobs == ["steps"]
    chosen = {"instance": "|".join(map(re.escape, addresses)).replace("\\", "\\\\"), "job": "steps"}
    for title, query in queries():
        # On a busy machine the straggler may not be named for a moment.
        in_time(partial(its.query, substituted(query)))
        at = {"time": f"{time.time() - 1}"}
        of_all, of_chosen, of_none = (
            its.query(substituted(query, **which), **at)
            for which in ({}, chosen, {"instance": "another"})
        )
        assert of_all == of_chosen, title
        assert of_none == [], title
        assert all(math.isfinite(value) for _, value in of_all), title


@pytest.mark.extended("test_every_metric_and_label_is_one_that_a_reducer_tells")
def test_what_the_dashboard_shows_is_so(watched):
    its, _ = watched
    shown = {}
    for title, query in queries():
        shown.setdefault(title, []).append(its.query(substituted(query)))
    named, share = max(shown["Straggler now"][0], key=lambda one: one[1])
    assert named == {"exported_job": "steps", "rank": f"{LATE_RANK}", "cause": "late"}
    assert 0.05 < share <= 1
    states = {labels["state"]: value for labels, value in shown["Reducers by state"][0]}
    assert states == {"serving": 2, "starting": 0, "draining": 0, "failing": 0}
    assert [[value for _, value in each] for each in shown["Ranks present"]] == [[RANKS]] * 2
    assert [value for _, value in shown["Ranks missing"][0]] == [0]
    for title in ("Rate in", "Rate out", "Rate of the jobs"):
        assert all(value > 1e6 for _, value in shown[title][0])
    median, p99 = ([value for _, value in each] for each in shown["Time of an all-reduce"])
    assert 0.001 < median[0] <= p99[0] < 5
    assert p99[0] > LATE_S / 2  # of each step, one waits for the rank at least
    assert all(value == 0 for _, value in shown["Failed all-reduces, each minute"][0])
    connections, members = ([v for _, v in each] for each in shown["Connections and members"])
    assert connections == members == [RANKS] * 2
    held, reserved, limit = ([v for _, v in each] for each in shown["Memory"])
    assert all(h <= r < most for h, r, most in zip(held, reserved, limit, strict=True))


@pytest.mark.extended("test_every_metric_and_label_is_one_that_a_reducer_tells")
def test_the_alerts_are_evaluated_and_name_the_straggler(watched):
    its, pool = watched
    told = {"alertname": "JobStraggler", "rank": f"{LATE_RANK}", "cause": "late"}
    in_time(lambda: any(told.items() <= alert.items() for alert in its.alerts()))
    (group,) = its.ask("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [alert["alert"] for alert in ALERTS]
    assert {(rule["health"], rule.get("lastError", "")) for rule in group["rules"]} == {("ok", "")}
    assert {alert["alertname"] for alert in its.alerts()} == {"JobStraggler"}
    pool[0].process.kill()  # the job goes on with the other one
    down = {"alertname": "ReducerDown", "instance": pool[0].http}
    in_time(lambda: any(down.items() <= alert.items() for alert in its.alerts()))
