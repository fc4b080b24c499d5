"""Predicts the cost of a step on many machines: fabrics, flows and plans."""
