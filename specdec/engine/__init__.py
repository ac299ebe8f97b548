"""The decode loop, the batch scheduler, KV cache slots, and caches of prompt prefixes."""
