"""The fuzz targets: on the inputs in the tree, and on what Hypothesis makes up."""

import faulthandler
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz import drivers
from fuzz.mutations import MUTATIONS
from fuzz.source import ViolationError, check
from fuzz.targets import TARGETS, corpus

TREE = Path(__file__).parents[2]
EXAMPLES = {"header": 300, "body": 200, "handshake": 60, "engine": 60, "session": 60, "zmtp": 60}


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_of_the_corpus_breaks_a_promise(name):
    run = TARGETS[name].load()
    paths = corpus(name)
    assert paths
    for path in paths:
        run(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_promise(name):
    target = TARGETS[name]
    run = target.load()

    @settings(
        max_examples=EXAMPLES[name],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=target.longest // 4, max_size=target.longest))
    def all_inputs(data):
        run(data)

    all_inputs()


def test_the_blind_driver_keeps_what_breaks_a_promise(tmp_path, monkeypatch):
    def run(data):
        check(len(data) < 100, "inputs are short")

    timer = []
    monkeypatch.setattr(drivers, "FINDINGS", tmp_path)
    monkeypatch.setattr(type(TARGETS["header"]), "load", lambda _: run)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: timer.clear())
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: timer.append("off"))
    with pytest.raises(ViolationError, match="inputs are short"):
        drivers.blind("header", runs=1000, seconds=0, seed=3)
    (path,) = tmp_path.iterdir()
    assert len(path.read_bytes()) >= 100
    assert timer, "else it ends this process, minutes later"
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_can_be_planted(name):
    for file, text, planted in MUTATIONS[name].edits:
        assert (TREE / file).read_text().count(text) == 1
        assert planted != text
