"""Running a workload against a target and recording it."""
