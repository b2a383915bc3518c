"""What is known about a model folder: config, tokenizer, stop tokens, dimensions, tensor names, weights, export."""
