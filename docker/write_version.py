"""Writes the package's version wherever a file names it: ``python docker/write_version.py``.

`reducer.__version__` is where it is changed; pyproject.toml takes it from there when the package is
built. A test holds that this has nothing left to write.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Names of files, and what is before a version in them.
PLACES = (
    ("docker/**/*.yaml", r"REGISTRY/(?:reducer|worker):"),
    ("docker/**/*.yml", r"REGISTRY/(?:reducer|worker):"),
    ("docs/*.md", r"REGISTRY/(?:reducer|worker):"),
    ("docker/kubernetes/pool/kustomization.yaml", r"newTag: "),
    ("docker/*.Dockerfile", r"ARG VERSION="),
    ("CITATION.cff", r"^version: "),
)
VERSION = r"\d+\.\d+\.\d+[\w.+-]*"


def rewritten(version: str) -> dict[Path, str]:
    """Return what the files that name a version are to hold, by path."""
    texts: dict[Path, str] = {}
    for pattern, before in PLACES:
        for path in sorted(ROOT.glob(pattern)):
            text = texts.get(path) or path.read_text()
            changed, times = re.subn(
                f"({before}){VERSION}", rf"\g<1>{version}", text, flags=re.MULTILINE
            )
            if times:
                texts[path] = changed
    return texts


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from reducer import __version__

    for file, text in rewritten(__version__).items():
        file.write_text(text)
