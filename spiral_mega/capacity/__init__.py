"""Whether a run fits its GPUs and how long its steps take, before a node-hour is spent."""
