"""Readers, a room for each format: bytes of a file to a config and tensors, and every check of them."""

from .files import Checkpoint, CheckpointError
from .llama2c import load_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint"]
