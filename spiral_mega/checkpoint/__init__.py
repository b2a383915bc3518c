"""Exact checkpoints of a run.

manager.py    write in the background, publish atomically, load, keep the newest ones
manifest.py   find damaged files before they are loaded
resume.py     whether a run may resume from a checkpoint; what of it belongs to which policy
"""
