"""Settings that only draft heads have, with their validation."""

from dataclasses import dataclass
from typing import Literal

from specdec.argument_checks import ErrorMessages, check_positive, check_range
from specdec.runtime.simd import PANEL_ROWS

# If a head's file does not name the target's layers: one low, one in the middle, one high
DEFAULT_N_TARGET_STATES = 3


@dataclass(frozen=True)
class HeadConfig:
    """Settings that only a draft head has, next to the ModelConfig of its layers (EAGLE-3: Li et al. 2025, arXiv:2503.01840).

    Attributes:
        target_dim: Width of the target's hidden states.
        target_layers: Layers of the target whose inputs the head reads; n_layers stands for the output of the last one. Empty if
            the head's file does not name them (see `get_target_layers`).
        draft_vocab_size: Rows of the head's classifier.
        own_embedding: The head has an embedding; else it uses its target's.
        own_classifier: The head has a classifier; else it uses its target's.
        norm_before_residual: Add the normed feature, not the plain one, to the residual stream.
        fc_norm: Input of fc that is normed: nothing, "each" hidden state, or the "whole" row of hidden states.
        norm_output: Norm the head's outputs before they are fed back as inputs.
    """

    target_dim: int
    target_layers: tuple[int, ...]
    draft_vocab_size: int
    own_embedding: bool
    own_classifier: bool
    norm_before_residual: bool = False
    fc_norm: Literal["", "each", "whole"] = ""
    norm_output: bool = False

    @property
    def n_target_states(self) -> int:
        """Number of the target's hidden states that are joined to one feature, the head's input."""
        return len(self.target_layers) or DEFAULT_N_TARGET_STATES

    def get_target_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the indexes of the layers before which hidden states are taken, in a target with n_layers layers."""
        return self.target_layers or (2, n_layers // 2, n_layers - 3)

    def find_errors(self, dim: int, vocab_size: int) -> ErrorMessages:
        """Yield an error message for each setting that is invalid for a draft head of width `dim` with ids below `vocab_size`."""
        yield from check_positive(self, "target_dim")
        yield from check_range(self, 1, vocab_size, "draft_vocab_size")
        if dim != self.target_dim and not (self.own_embedding and self.own_classifier):
            yield f"dim is {dim}; expected target_dim, {self.target_dim}, for a head with the target's embedding or classifier"
        if self.draft_vocab_size != vocab_size and not self.own_classifier:
            yield f"draft_vocab_size is {self.draft_vocab_size}; the target's classifier has {vocab_size}"


@dataclass(frozen=True)
class AssistantConfig(HeadConfig):
    """The part of a model configuration that only Gemma 4's assistant has: how its vocabulary is divided into centroids.

    Attributes:
        n_centroids: The number of parts of equal size into which the vocabulary is divided, in the order of the classifier's
            rows; 0 for a classifier without centroids.
        centroid_top_k: A pass computes logits for the tokens of this number of parts, those with the nearest centroids.
    """

    n_centroids: int = 0
    centroid_top_k: int = 0

    @property
    def n_target_states(self) -> int:
        """The number of hidden states of the target that the assistant reads per token."""
        return 1

    @property
    def n_candidates(self) -> int:
        """The number of token ids that get logits in a pass: all, or with centroids those of the nearest parts."""
        return self.draft_vocab_size // self.n_centroids * self.centroid_top_k if self.n_centroids else self.draft_vocab_size

    def get_target_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the indices of the hidden states that the assistant reads from n_layers layers: those after the final norm."""
        return (n_layers + 1,)

    def find_errors(self, dim: int, vocab_size: int) -> ErrorMessages:
        """Yield an error message for each field that is not valid for a model of this width and vocabulary size."""
        yield from check_positive(self, "target_dim")
        if self.draft_vocab_size != vocab_size:
            yield f"draft_vocab_size is {self.draft_vocab_size}; expected vocab_size, {vocab_size}"
        if self.n_centroids < 0 or (self.n_centroids and self.draft_vocab_size % (self.n_centroids * PANEL_ROWS)):
            yield f"n_centroids is {self.n_centroids}; expected equal parts of a multiple of {PANEL_ROWS} tokens"
        yield from check_range(self, min(self.n_centroids, 1), self.n_centroids, "centroid_top_k")
