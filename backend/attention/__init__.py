"""Attention metadata and the backends that read the paged cache."""
