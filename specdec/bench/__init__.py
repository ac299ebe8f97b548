"""Measuring: the target beside the pair, settings beside each other, passes beside the memory. No terminals."""
