"""The conformance kit: hard cases for every implementation of every operation.

mrb check                                                  everything, as a table
pytest --pyargs moe_routing_bench.conformance              the same under pytest
MRB_CHECK=combine.mine pytest --pyargs ...                 one implementation
"""
