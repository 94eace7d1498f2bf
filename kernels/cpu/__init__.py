"""Kernels compiled on the machine they run on, for products that torch has no fast CPU kernel for."""
