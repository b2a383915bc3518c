"""Estimators and bootstrap intervals that evaluation, analysis and reproduction share. Pure functions."""
