"""Terminal views of decoding events, status lines, keys and signal handling; loads no models."""
