"""Pure functions of the method: which sets are drawn, who gets which credit, and what the loss of a token is."""
