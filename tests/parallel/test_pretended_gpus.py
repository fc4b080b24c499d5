"""On GPUs the layer is built, waits only where it says so, and sends one chunk while another is computed."""

from __future__ import annotations

import pytest

from child_process import python

pytestmark = pytest.mark.slow


def test_on_pretended_gpus() -> None:
    python("import pretended_gpus; pretended_gpus.main()")
