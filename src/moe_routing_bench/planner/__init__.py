"""Fabrics, flows and plans: what a step costs on many machines, predicted."""
