"""How quantized weights lie in a checkpoint's files."""
