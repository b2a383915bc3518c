"""Prompts of search and aggregation traces: built-in templates, control tokens, and the prompter that renders them."""
