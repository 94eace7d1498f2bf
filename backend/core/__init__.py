"""Scheduling and block accounting in plain Python: no torch."""
