"""One op per file: a launcher that checks its inputs, and the Triton kernel it launches."""
