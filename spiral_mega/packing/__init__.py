"""From weighted traces to micro-batches: what is trained on, how it is balanced over ranks, how it is laid out."""
