"""Measuring a policy on held-out problems."""
