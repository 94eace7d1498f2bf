"""One file per op: inputs to try it on, tolerances, what it must move and do, and the shapes to time."""
