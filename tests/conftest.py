import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # the shapes are tiny: a second thread beside another busy process costs 10x
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
