"""The modules a decoder is built from."""
