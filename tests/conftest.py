import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # the shapes are tiny: a second thread beside another busy process costs 10x
    torch.set_num_threads(1)
    # what the person at the keyboard has measured must not choose what is tested
    os.environ.pop("MRB_DECISIONS", None)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
