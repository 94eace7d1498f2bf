"""Weights in fewer bits: one file a method, one a way of storing them, and what a loaded layer computes with them."""
