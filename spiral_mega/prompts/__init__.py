"""Prompts of search and aggregation traces."""
