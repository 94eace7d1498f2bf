"""What runs on the device: input batch, KV cache tensors, the model runner."""
