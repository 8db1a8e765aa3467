"""Files that hold what is to come out, whole: a test compares them, or writes them anew.

    UPDATE_GOLDEN=1 python -m pytest tests/reducer/test_metrics.py

Review what such a run changes, as anything else that is written by hand.
"""

import os
from pathlib import Path


def check_golden(path, text):
    """Compare a text with a golden file, byte for byte."""
    path = Path(path)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text, f"if that is right, with UPDATE_GOLDEN=1: {path.name}"
