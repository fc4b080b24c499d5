"""Settings for `pytest --pyargs moe_routing_bench.conformance`."""

import torch


def pytest_configure(config: object) -> None:
    # the shapes are tiny: a second thread beside another busy process costs 10x
    torch.set_num_threads(1)
