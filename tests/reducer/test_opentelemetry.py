"""Lines of `--log-format json` by the collector's configuration in docs/observing.md.

What a collector's operators do is written down here once more, after their documents: json_parser
with its timestamp and severity, move, remove.
"""

import json
import os
import re
import subprocess
from datetime import UTC, datetime

import pytest
import yaml

from tests.commands import serving
from tests.ranks import ROOT
from worker_client.client.bootstrap import connect

PAGE = (ROOT / "docs" / "observing.md").read_text()
RFC_3339 = "2006-01-02T15:04:05Z07:00"  # as Go's layout, which takes a fraction of a second, too
# What the default preset of a severity knows of our levels: names to numbers of the data model.
SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17}


def configuration():
    code = PAGE.partition("\n### OpenTelemetry\n")[2].partition("```yaml\n")[2].partition("```")[0]
    return yaml.safe_load(code)


def operators():
    """What the one receiver of the pipeline does with a line, in this order."""
    written = configuration()
    (name,) = written["service"]["pipelines"]["logs"]["receivers"]
    return written["receivers"][name]["operators"]


def take(record, field):
    """Take a value out of a record by the name of its field, ``body`` or ``attributes.NAME``."""
    top, _, name = field.partition(".")
    return record[top].pop(name) if name else record.pop(top)


def parse_json(record, operator):
    record["attributes"] |= json.loads(record["body"])
    if (timestamp := operator["timestamp"]) is not None:
        assert (timestamp["layout_type"], timestamp["layout"]) == ("gotime", RFC_3339)
        text = record["attributes"][timestamp["parse_from"].removeprefix("attributes.")]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", text)
        record["timestamp"] = datetime.fromisoformat(text)
    level = record["attributes"][operator["severity"]["parse_from"].removeprefix("attributes.")]
    record["severity"] = SEVERITIES[level]


def collected(line):
    """Return the record that a collector makes of a line."""
    record = {"body": line, "attributes": {}}
    for operator in operators():
        match operator:
            case {"type": "json_parser"}:
                parse_json(record, operator)
            case {"type": "move", "from": source, "to": "body"}:
                record["body"] = take(record, source)
            case {"type": "remove", "field": field}:
                take(record, field)
            case _:
                pytest.fail(f"no such operator is known here: {operator}")
    return record


def test_a_collector_takes_a_reducers_lines():
    began = datetime.now(UTC)
    with serving("--log-format", "json", stderr=subprocess.PIPE) as (process, address, _):
        with connect(servers=address, rank=0, world_size=1, job="collected"):
            pass
        process.terminate()
        records = [collected(line) for line in process.stderr]
    until = datetime.now(UTC)
    assert all(began <= record["timestamp"] <= until for record in records)
    assert {record["severity"] for record in records} == {9}
    (came,) = (one for one in records if one["body"] == "job 'collected': all 1 ranks are here")
    assert came["attributes"] == {"logger": "reducer.engine.engine", "job": "collected"}
    (left,) = (one for one in records if "left the job" in one["body"])
    assert left["attributes"].items() >= {**came["attributes"], "rank": 0}.items()


def test_a_warning_is_one():
    given = {**os.environ, "REDUCTION_IMPL": "plain"}
    with serving("--log-format", "json", stderr=subprocess.PIPE, env=given) as (process, *_):
        process.terminate()
        records = [collected(line) for line in process.stderr]
    said = "the reference reducer: one job, for loopback and private networks"
    assert [record["body"] for record in records if record["severity"] == 13] == [said]
