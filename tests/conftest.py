import os

import pytest
import torch

from moe_routing_bench import native


def pytest_configure(config: pytest.Config) -> None:
    # the shapes are tiny: a second thread beside another busy process costs 10x
    torch.set_num_threads(1)
    # what the person at the keyboard has measured must not choose what is tested
    os.environ.pop("MRB_DECISIONS", None)
    if native.missing_tool() is not None:  # on such a machine every layer says so; test_auto.py sees to it
        config.addinivalue_line("filterwarnings", 'ignore:impl="auto" would run compiled C')


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
