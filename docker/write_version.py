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
    ("docker/helm/*/Chart.yaml", r'^appVersion: "'),
    ("CITATION.cff", r"^version: "),
)
SEMANTIC_PLACES = (("docker/helm/*/Chart.yaml", r"^version: "),)
VERSION = r"\d+\.\d+\.\d+[\w.+-]*"


def rewritten(version: str) -> dict[Path, str]:
    """Return what the files that name a version are to hold, by path."""
    texts: dict[Path, str] = {}
    # A chart's version is a semantic one: 1.0.0-rc1 for Python's 1.0.0rc1.
    semantic = re.sub(r"^(\d+\.\d+\.\d+)\.?(?=[a-z])", r"\1-", version)
    places = [(*place, version) for place in PLACES]
    places += [(*place, semantic) for place in SEMANTIC_PLACES]
    for pattern, before, written in places:
        for path in sorted(ROOT.glob(pattern)):
            text = texts.get(path) or path.read_text()
            changed, times = re.subn(
                f"({before}){VERSION}", rf"\g<1>{written}", text, flags=re.MULTILINE
            )
            if times:
                texts[path] = changed
    return texts


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from reducer import __version__

    for file, text in rewritten(__version__).items():
        file.write_text(text)
