"""Readers, a room for each format: bytes of a file to a config and tensors, and every check of them."""

from .llama2c import load_checkpoint
from .model_file import Checkpoint, CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint"]
