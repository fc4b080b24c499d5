"""Where this user's measurements and compiled kernels are kept: MRB_HOME, or a folder in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    given = os.environ.get("MRB_HOME")
    return Path(given) if given else Path.home() / ".cache" / "moe-routing-bench"


def default_results() -> Path:
    """Where `mrb bench` writes and `mrb results` reads unless a folder is named."""
    return home() / "results"
