import sys

import pytest
import torch

from bench import ddp, ddp_models, options
from bench.ddp_figures import Reports
from bench.results import DdpResults
from tests.ranks import Loopback

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "pool", "forks"),
    [
        ("mlp", {"reducers": 2}, False),
        ("mlp", {"embedded": True}, True),
        ("digits", {"reducers": 1}, False),
    ],
)
def test_a_tiny_run(model, pool, forks, tmp_path, monkeypatch):
    file, picture = tmp_path / "ddp.json", tmp_path / "ddp.png"
    if forks:
        monkeypatch.setattr(options, "lab", lambda hosts, _: Loopback(hosts))

    with pytest.raises(SystemExit) as exited:
        ddp.main(
            model=ddp.Model(model),
            workers=2,
            **pool,
            unshaped=True,
            compute="10ms",
            gloo_caps="25",
            steps=3,
            rounds=1,
            json=file,
            plot=picture,
        )

    assert exited.value.code == 0
    found = DdpResults.model_validate_json(file.read_text())
    assert picture.stat().st_size > 0
    assert [row.variant for row in found.rows] == ["reducers", "gloo-25", "no-op"]
    ours, gloo, no_op = found.rows
    weights = 2 * found.nbytes // 4
    for row in (ours, gloo):
        assert (row.wrong, row.checked, row.identical) == (0, weights, True)
    assert no_op.exposed_ms == 0
    for row in found.rows:
        assert row.samples_per_s == pytest.approx(2 * found.batch / row.step_ms * 1e3)
    assert found.ours_over_gloo == pytest.approx(gloo.step_ms / ours.step_ms)


def test_parameters_are_those_of_the_real_networks():
    counts = {
        name: (sum(1 for _ in ddp_models.shapes(name)), ddp_models.nbytes(name) // 4)
        for name in ("resnet50", "gpt2")
    }
    assert counts == {"resnet50": (161, 25_557_032), "gpt2": (148, 124_439_808)}


def test_layers_end_at_their_shares_of_the_passes(monkeypatch):
    reached = []
    monkeypatch.setattr(ddp_models.Pace, "reach", lambda _, share: reached.append(share))
    layers = [ddp_models.Layer(((1,),), cost) for cost in (1.0, 2.0, 5.0)]
    ddp_models.Simulated(layers, compute_s=1.0)(torch.tensor(1.0)).backward()
    assert reached == [1 / 8, 3 / 8, 1, 5 / 8, 7 / 8, 1]


def turn(variant, rank, steps_s):
    figures = {"steps_s": steps_s, "backward_s": 0.25, "cpu_s": 0.0}
    return {"event": "turn", "variant": variant, "rank": rank, **figures}


def end(rank, digest, unlike=0):
    figures = {"unlike": unlike, "largest_difference": 0.0, "weights": 10}
    return {"event": "end", "variant": "reducers", "rank": rank, "digest": digest, **figures}


def test_exposed_communication_is_over_the_no_op_hook_of_the_same_round():
    reports = Reports(ranks=2)
    for rank in range(2):
        for ours, no_op in ((1.5, 0.5), (2.5, 0.75), (1.75, 0.5)):
            reports.add(turn("reducers", rank, [ours, ours]))
            reports.add(turn("no-op", rank, [no_op, no_op]))
        reports.add({"event": "exchange", "hook": "reducers", "rank": rank, "seconds": 1.0 + rank})
        reports.add(end(rank, "same"))
    row = reports.row("reducers", hook="reducers", cap_mb=64, batch=7)
    assert row.step_ms == 1750
    assert row.exposed_ms == 1250  # the median of 1000, 1750 and 1250
    assert row.all_reduce_ms == 2000  # the slowest rank's
    assert row.ideal_ms == 1750
    assert row.exposed_over_ideal == pytest.approx(1250 / 1750)
    assert row.samples_per_s == pytest.approx(2 * 7 / 1.75)


def test_weights_of_a_rank_with_other_bits_are_wrong():
    reports = Reports(ranks=2)
    for rank in range(2):
        reports.add(turn("reducers", rank, [1.0]))
        reports.add(turn("no-op", rank, [1.0]))
    reports.add(end(1, "other"))
    reports.add(end(0, "one", unlike=3))
    row = reports.row("reducers", hook="reducers", cap_mb=64, batch=1)
    assert (row.wrong, row.checked, row.identical) == (13, 20, False)


def test_too_little_memory_is_said_before_anything_starts():
    with pytest.raises(SystemExit, match=r"gpt2 needs .* GB of memory for 500 workers"):
        ddp.main(model=ddp.Model.GPT2, workers=500)
