"""Write the pages of this folder that are made from the code: ``python docs/generate.py``.

`PAGES` names each page and the function that returns its text; a test holds that the files are what
these functions return.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import tomllib
from pydantic import ByteSize

from reducer import cli
from reducer.config import ReducerConfig
from worker_client.config import InitSettings, WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic.fields import FieldInfo
    from pydantic_settings import BaseSettings

DOCS = Path(__file__).parent
_OPEN, _CLOSE = "<!-- rooms: made by docs/generate.py -->", "<!-- /rooms -->"

_SETTINGS = """\
# Settings

[docs/generate.py](generate.py) writes this page from the docstrings of `WorkerConfig`
(`worker_client/config.py`) and `ReducerConfig` (`reducer/config.py`). The [glossary](glossary.md)
explains words such as chunk, link and round.

Arguments of `worker_client.init()` and options of `reducer serve` beat the environment, which beats
the defaults. A setting without an argument or option is set by its variable alone. Sizes take units
such as `256KiB` or `16MB`, durations such as `5ms`, `300s` or `2min`; a bare number is bytes, or
seconds. An unknown `REDUCTION_` variable is an error at a worker and at `reducer serve`, and the
message suggests the name that may have been meant.

## Workers

`worker_client.init()` also takes `rank` and `world_size`; by default they are the process group's,
or the launcher's.

{workers}

## Reducers

The variables also hold for a reducer that a rank hosts. `reducer serve` also takes `--log-level`
(`info` by default) and `--stop-at-eof`.

{reducers}
"""


def settings() -> str:
    """Return the page of the settings: a table for workers, and one for reducers."""
    arguments = {name: f"`{name}`" for name in InitSettings.__annotations__}
    options = {
        name: f"`--{name.replace('_', '-')}`" for name in inspect.signature(cli.serve).parameters
    }
    return _SETTINGS.format(
        workers=_table(WorkerConfig, "argument", arguments),
        reducers=_table(ReducerConfig, "option", options),
    )


def architecture() -> str:
    """Return the page of the architecture, with the floors of both packages drawn anew."""
    written = (DOCS / "architecture.md").read_text()
    contracts = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    drawn = ["```"]
    for contract in contracts["contracts"]:
        if contract["type"] == "layers":
            (package,) = contract["containers"]
            drawn += [package, "─" * len(package), *_floors(contract["layers"], package), ""]
    drawn[-1] = "```"
    picture = "\n".join(drawn)
    return re.sub(rf"(?s){_OPEN}.*{_CLOSE}", lambda _: f"{_OPEN}\n{picture}\n{_CLOSE}", written)


PAGES: dict[str, Callable[[], str]] = {"architecture.md": architecture, "settings.md": settings}


def _floors(layers: list[str], package: str) -> Iterator[str]:
    """Yield the lines of a contract's floors from the top one down, a / behind each room."""
    for number, layer in enumerate(layers, 1):
        words = [
            f"{word}/" if (DOCS.parent / package / word).is_dir() else word
            for word in layer.split()
        ]
        yield from textwrap.wrap(
            " ".join(words), 98, initial_indent=f"{number} ", subsequent_indent="  "
        )


def _table(config: type[BaseSettings], kind: str, given: dict[str, str]) -> str:
    rows = [f"| variable | {kind} | default | meaning |", "|---|---|---|---|"]
    for name, field in config.model_fields.items():
        variable = f"`REDUCTION_{name.upper()}`"
        meaning = _markdown(field.description or "")
        rows.append(f"| {variable} | {given.get(name, '')} | {_default(field)} | {meaning} |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    """Return a default as one would write it, or "not set"."""
    value = field.default
    if value is None or value in ((), ""):
        return "not set"
    if isinstance(value, ByteSize):  # 0 stands for auto in the sizes that have it
        return f"`{value.human_readable().replace('.0', '')}`" if value else "`auto`"
    if isinstance(value, float):
        return f"`{value:g}s`" if value >= 1 or not value else f"`{value * 1000:g}ms`"
    return f"`{int(value) if isinstance(value, bool) else value}`"


def _markdown(docstring: str) -> str:
    """Return a docstring as one line of Markdown, with links to the pages that it names."""
    text = " ".join(docstring.split()).replace("``", "`").replace("|", r"\|")
    text = re.sub(r"\b([A-Z]+_[A-Z_]+)(=\w+)?", r"`\1\2`", text)
    text = re.sub(r"\(docs/(\w+)(\.md[#\w-]*)\)", r"([\1](\1\2))", text)
    return re.sub(r"\(CONTRIBUTING(\.md[#\w-]*)\)", r"([contributing](../CONTRIBUTING\1))", text)


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
