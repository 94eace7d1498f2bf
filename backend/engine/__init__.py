"""The step loop and the thread that owns the device."""
