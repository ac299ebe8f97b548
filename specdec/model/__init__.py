"""Models: architectures, the transformer and its KV cache."""
