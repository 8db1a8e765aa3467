"""`examples/failover.ipynb`, executed by the command for readers without a browser."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "failover.ipynb"
STEPS, BATCH = 200, 128


def cells(notebook):
    return [cell for cell in json.loads(notebook.read_text())["cells"] if "outputs" in cell]


def printed(cell):
    outputs = [output for output in cell["outputs"] if output.get("name") == "stdout"]
    return "".join(line for output in outputs for line in output["text"])


def losses_of_one_process():
    """The losses of the same training by one process, with the batches of all ranks."""
    torch = pytest.importorskip("torch", reason="needs torch")
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn")
    images, labels = map(torch.tensor, datasets.load_digits(return_X_y=True))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    choice = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=choice)
        loss = torch.nn.functional.cross_entropy(model(images[batch].float() / 16), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def test_the_notebook_is_kept_without_outputs():
    assert [cell["outputs"] for cell in cells(NOTEBOOK)] == [[]] * len(cells(NOTEBOOK))
    assert {cell["execution_count"] for cell in cells(NOTEBOOK)} == {None}


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_the_loss_goes_on_when_a_reducer_is_killed(tmp_path):
    for module in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(module, reason=f"needs {module}")
    expected = list(losses_of_one_process())
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("REDUCTION_")}
    executed = tmp_path / "executed.ipynb"
    done = run_command(
        *(Path(sys.executable).with_name("jupyter-execute"), f"--output={executed}", NOTEBOOK),
        env={**inherited, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        timeout=360,
    )
    assert done.returncode == 0, done.stderr
    of = {cell["id"]: cell for cell in cells(executed)}
    addresses = re.findall(r"^a reducer at (\S+)$", printed(of["pool"]), re.M)
    assert len(set(addresses)) == 2
    trainings = [printed(of[name]) for name in ("undisturbed", "disturbed")]
    for said, lost in zip(trainings, "01", strict=True):
        losses = re.findall(r"^step (\d+): loss (\S+)$", said, re.M)
        assert [int(step) for step, _ in losses] == list(range(20, STEPS + 1, 20))
        for step, loss in losses:
            assert float(loss) == pytest.approx(expected[int(step) - 1], rel=1e-5)
        ends = re.findall(r"^rank \d: weights (\w{16}), reducers lost: (\d)$", said, re.M)
        assert ends == [(ends[0][0], lost)] * 2
    death = f"the reducer at {addresses[0]} is killed\n"
    undisturbed, disturbed = (re.sub(r"lost: \d", "", said) for said in trainings)
    assert death not in undisturbed
    assert disturbed.replace(death, "") == undisturbed
    assert re.search(f"^step 100: .*\n{death}step 120: ", disturbed, re.M)
    (plot,) = of["losses"]["outputs"]
    assert plot["data"]["image/png"]
