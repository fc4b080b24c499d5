"""Experts of one layer on several ranks: placements, groups of processes, exchange of rows, faults."""
