"""What is concluded from each environment of `environments.yaml`, and what is refused there."""

import json
import re

import pytest

from reducer.errors import ConfigError
from tests.launch.environments import LAUNCHERS, TABLE, variables, vertex
from worker_client.launch import Launcher, Resolved, decide, resolve

FIELDS = set(Resolved.__dataclass_fields__) - {"reasons", "also"}
SHELL = {"PATH": "/bin", "HOME": "/root"}
ALONE = {"PATH": "/bin", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("case", TABLE["concluded"])
def test_who_it_is_and_a_reason_for_each_field(case):
    given, expected = TABLE["concluded"][case]
    found = resolve(SHELL | variables(given))
    if "reducers" in expected:
        expected = {**expected, "reducers": tuple(expected["reducers"])}
    said = {name: getattr(found, name) for name in FIELDS}
    assert said == {name: expected.get(name, getattr(Resolved(), name)) for name in FIELDS}
    assert not [name for name in expected.keys() - {"launcher", "role"} if not found.reasons[name]]


@pytest.mark.parametrize("case", TABLE["refused"])
def test_what_is_malformed_or_contradicts_itself_is_quoted(case):
    given, says = TABLE["refused"][case]
    with pytest.raises(ConfigError, match=says):
        resolve(variables(given))


def test_deep_json_is_refused_and_long_values_are_cut_in_messages():
    with pytest.raises(ConfigError, match=r"^TF_CONFIG: .* nested too deeply"):
        resolve({"TF_CONFIG": "[" * 100_000})
    with pytest.raises(ConfigError) as caught:
        resolve({"TF_CONFIG": json.dumps({"cluster": "x" * 5000})})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("given", "launcher", "also"), TABLE["goes_before"])
def test_who_goes_before(given, launcher, also):
    found = resolve(variables(given))
    assert found.launcher == launcher
    assert [other for other in found.also if other is not Launcher.ENV] == also


def test_one_process_on_each_node_is_its_rank():
    assert resolve(vertex(1, 1)).identity == (2, 3)
    assert resolve(LAUNCHERS["torchrun"]).identity == (5, 8)
    assert resolve({}).identity == (None, None)
    assert resolve(vertex(2, 1)).identity == (None, 3)


@pytest.mark.parametrize(("given", "said"), TABLE["with_others"])
def test_what_was_started_with_others_is_not_taken_for_a_job_of_one(given, said):
    environment = ALONE | variables(given)
    found = resolve(environment)
    with pytest.raises(ConfigError) as error:
        found.check_alone()
    for part in (said, "set RANK and WORLD_SIZE", f"unset {said.partition('=')[0]} if it is alone"):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match=re.escape(said)):
        decide(found, {}, ["train.py"], processes="auto", devices=lambda: 0)
    resolve(environment | LAUNCHERS["torchrun"]).check_alone()  # who started last knows best


@pytest.mark.parametrize("given", TABLE["alone"])
def test_a_process_that_is_alone_is_a_job_of_one(given):
    resolve(ALONE | variables(given)).check_alone()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (vertex(1, 1), {"RANK": "2", "WORLD_SIZE": "5"}),  # of all replicas
        (vertex(1, 1), {"RANK": "1", "WORLD_SIZE": "3"}),
        (vertex(0, 0), {"RANK": "0", "WORLD_SIZE": "1"}),
    ],
)
def test_a_rank_that_contradicts_the_cluster_is_refused(place, told):
    says = "RANK={RANK} and WORLD_SIZE={WORLD_SIZE} contradict CLUSTER_SPEC".format(**told)
    with pytest.raises(ConfigError, match=says):
        resolve({**place, **told})
    resolve({**place, **told, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})  # counts processes
