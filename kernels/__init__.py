"""GPU kernels, their plain-torch references, and the registry that joins the two.

Holds nothing but this docstring: transformers looks for a distribution called `kernels` and may execute this file, so
it must import neither triton nor CUDA and must carry no version.
"""
