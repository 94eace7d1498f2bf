"""Draft heads: small modules on a target's hidden states that guess several tokens ahead, their training and their files."""
