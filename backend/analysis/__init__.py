"""Closed forms for what a model and a workload must cost, each with its arithmetic as a line to read. No torch."""
