"""What is asked of a target, and when."""
