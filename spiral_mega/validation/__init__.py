"""Load a configuration and refuse contradictions between its keys."""
