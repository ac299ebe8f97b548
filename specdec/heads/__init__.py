"""Draft heads: EAGLE-3, multi-token prediction, and assistants on the KV cache of their target."""
