from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import typer

from bench import kernels as bench
from reducer import kernels

if TYPE_CHECKING:
    from pathlib import Path

compiled = pytest.mark.skipif(
    kernels.select().name == "numpy", reason="the compiled kernels are not built"
)


@compiled
def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "kernels.json", tmp_path / "kernels.png"

    with pytest.raises(SystemExit) as exited:
        bench.main(sizes="64KiB,4MiB", dtypes="float32,bfloat16", rounds=1, json=file, plot=picture)

    assert exited.value.code == 0
    found = bench.KernelsResults.model_validate_json(file.read_text())
    assert [(row.dtype, row.nbytes) for row in found.rows] == [
        ("float32", 64 << 10),
        ("float32", 4096 << 10),
        ("bfloat16", 64 << 10),
        ("bfloat16", 4096 << 10),
    ]
    for row in found.rows:
        assert min(row.one_pass, row.chain, row.fresh, row.numpy, row.read, row.memcpy) > 0
    large = found.rows[1]
    assert found.over_read == large.one_pass / large.read
    assert found.over_chain == large.one_pass / large.chain
    assert picture.stat().st_size > 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(found.rows) + 1


@compiled
@pytest.mark.parametrize("check", [False, True])
def test_no_bar_is_reached_without_large_inputs(check: bool) -> None:
    with pytest.raises(SystemExit) as exited:
        bench.main(sizes="64KiB", dtypes="float32", rounds=1, check=check)
    assert exited.value.code == int(check)


@compiled
def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="float8"):
        bench.main(dtypes="float32,float8")


def row(one_pass: float) -> bench.Row:
    others = {"chain": 10.0, "fresh": 9.0, "numpy": 8.0, "read": 20.0, "memcpy": 11.0}
    return bench.Row(dtype="float32", nbytes=bench.OUT_OF_CACHE, one_pass=one_pass, **others)


def test_ratios_are_medians_of_the_large_rows() -> None:
    found = bench.collect([row(16.0), row(18.0), row(30.0)], rounds=5)
    assert (found.over_read, found.over_chain) == (0.9, 1.8)
    assert "0.90 of read" in bench.table(found)
