"""Layers: blocks of attention, MLPs and mixers, with their kernels."""
