"""Saving: exact checkpoints to resume from (manager.py), and models in Hugging Face form (export.py)."""
