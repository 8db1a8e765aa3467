"""Files of docs/ that `docs/generate.py` makes: they are what it makes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from reducer.config import ReducerConfig
from worker_client.config import InitSettings, WorkerConfig

DOCS = Path(__file__).parent.parent / "docs"
pytest.importorskip("tomllib", reason="Python 3.11 reads the contracts")
PAGES = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_generator_makes(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run: .venv/bin/python docs/generate.py"


def test_the_settings_tables_are_complete() -> None:
    workers, reducers = (DOCS / "settings.md").read_text().split("\n## ")[1:]
    arguments = set(InitSettings.__annotations__) - {"rank", "world_size"}
    for text, config, given in (
        (workers, WorkerConfig, {f"`{name}`" for name in arguments}),
        (reducers, ReducerConfig, {f"`--{name}`" for name in ("bind", "max-jobs", "http", "cpus")}),
    ):
        rows = [row.split(" | ") for row in text.splitlines() if row.startswith("| `")]
        variables = [row[0].strip("| `") for row in rows]
        assert variables == [f"REDUCTION_{name.upper()}" for name in config.model_fields]
        assert given <= {row[1] for row in rows}
        assert all(re.fullmatch(r"not set|`[^`]+`", row[2]) for row in rows)
        assert all(row[3].endswith(". |") for row in rows)
