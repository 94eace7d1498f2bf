"""Speculative decoding: what drafts tokens, and what decides which of them stay."""
