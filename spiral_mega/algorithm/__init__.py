"""Pure functions of the method: drawing sets, assigning credit, weighting traces, token losses."""
