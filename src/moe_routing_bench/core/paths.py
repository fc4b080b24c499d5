"""The folder for measurements and compiled kernels: MRB_HOME, or a folder in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    given = os.environ.get("MRB_HOME")
    return Path(given) if given else Path.home() / ".cache" / "moe-routing-bench"


def default_results() -> Path:
    """The folder that `mrb bench` writes and `mrb results` reads if no other is named."""
    return home() / "results"
