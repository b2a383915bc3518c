"""Schedules of SPIRAL's rollout step compared on simulated engines: `python -m benchmarks.rollout_schedule --help`."""
