"""A rollout step on simulated engines: lengths and speeds (model.py), one engine, the event loop (schedule.py)."""
