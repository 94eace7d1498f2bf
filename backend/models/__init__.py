"""Model sources, checkpoint loading and the generic decoder."""
