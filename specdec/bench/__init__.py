"""Benchmarks: speculation against the target alone, settings against each other, and passes against memory bandwidth."""
