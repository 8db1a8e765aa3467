"""What is to be concluded from an environment, as tables of tests say it."""

from typing import Any

import pytest

from reducer.errors import ConfigError
from worker_client.launch import Resolved, resolve

# What is set, and what is to be concluded; what is not named is to be None, or as by default.
Case = tuple[dict[str, str], dict[str, Any]]
# What is set, and what its error says.
Mistake = tuple[dict[str, str], str]

FIELDS = set(Resolved.__dataclass_fields__) - {"reasons", "also"}


def concludes(environment, expected):
    """Check each field, and that somebody is named for each that was found out."""
    found = resolve({"PATH": "/bin", "HOME": "/root", **environment})
    default = Resolved()
    pairs = {
        name: (getattr(found, name), expected.get(name, getattr(default, name))) for name in FIELDS
    }
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    assert not wrong, f"found, and expected: {wrong}"
    for name in expected.keys() - {"launcher", "role"}:
        assert found.reasons[name], f"nobody said {name}"


def refuses(environment, message):
    """Check that it is refused, and how."""
    with pytest.raises(ConfigError, match=message):
        resolve(environment)
