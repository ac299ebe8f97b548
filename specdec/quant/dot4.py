"""Products of four bytes: the instruction of each kind of CPU that adds them to an int32 sum, exactly.

Weights w are stored as unsigned bytes, activations x are signed and at least -127; a word of a vector holds 4 of them. AVX2
and NEON add two products in 16 bits first, which are then added to the 32-bit sums: with w - 128, two are the most that fit
(2 * 128 * 127 = 32512), with weights below 2^bits more do.

With the portable products, passes of SmolLM2 Q8_0 over 1, 8 and 64 tokens take 1.2, 5.3 and 5.4 times as long as with AVX-512
VNNI, of Q4_K_M 1.3, 4.7 and 4.5 times. A matmul of 8 tokens from a cache takes 3.7 times as long as with AVX2 in int8, 4.5 times
in Q8_0 and 5.4 times in Q4_K.
"""

from typing import NamedTuple

from specdec.quant.matmul import TileShape, choose_tile_shape
from specdec.runtime import tile_simd
from specdec.runtime.code_cache import CompiledFunction, jitable
from specdec.runtime.simd import MAX_TILE_TOKENS, REGISTER_LANES

MINUS_128_MASK = -0x7F7F7F80  # xor with it turns four bytes w into w - 128
# Tokens of an AVX2 tile: 8 rows for each token; up to 2 tokens take all rows of a panel, in memory order.
AVX2_MAX_TOKENS, AVX2_MAX_FULL_PANEL_TOKENS = 8, 2
NEON_MAX_TOKENS = 4  # tokens of a NEON tile: 8 rows for 3 or 4, 16 for 2, all rows of a panel for 1


@jitable
def keep_words(words):
    """Return the words unchanged."""
    return words


@jitable
def subtract_128(words):
    """Return w - 128 of four bytes w per word."""
    return tile_simd.bit_xor(words, MINUS_128_MASK)


@jitable
def prepare_avx2(words):
    """Return w - 128 of four bytes w per word, and |w - 128|."""
    signed = subtract_128(words)
    return signed, tile_simd.absolute_bytes(signed)


@jitable
def dot4_prepared_avx2(sums, w, x):
    """Return sums plus the products of w - 128, as `prepare_avx2` returns it, and x."""
    return tile_simd.dot4_avx2(sums, w[0], w[1], x)


class Dot4(NamedTuple):
    """The sums of byte products on one kind of CPU, as functions that compiled code calls.

    Attributes:
        name: Name of the instruction set.
        lanes: int32 lanes of its registers.
        prepare: words -> weights in the form that `dot4` takes, made once for all tokens.
        dot4: (sums, weights, x) -> sums plus 4 products.
        is_signed: Whether `prepare` returns w - 128 instead of w.
        max_tokens: Maximum number of tokens of a tile.
        pairs: Sums in 16 bits for weights of few bits, which are not prepared; None: `dot4` is as fast.
    """

    name: str
    lanes: int
    prepare: CompiledFunction
    dot4: CompiledFunction
    is_signed: bool = False
    max_tokens: int = MAX_TILE_TOKENS
    pairs: tile_simd.PairOps | None = None

    def choose_tile_shape(self, rows: int, n_tokens: int) -> TileShape:
        """Return the shape of a tile over panels of `rows` rows for n_tokens tokens."""
        if self.name == "avx2":
            return TileShape(rows if n_tokens <= AVX2_MAX_FULL_PANEL_TOKENS else 8, n_tokens, self.lanes)
        if self.name == "neon":
            return TileShape(rows // n_tokens // 4 * 4, n_tokens, self.lanes)
        return choose_tile_shape(rows, n_tokens, self.lanes, is_weight_stationary=True)


DOT4_BY_NAME = {
    dot.name: dot
    for dot in (
        Dot4("portable", REGISTER_LANES, keep_words, tile_simd.dot4),
        Dot4("avx512vnni", 16, keep_words, tile_simd.dot4_vnni),
        Dot4("avxvnni", 8, keep_words, tile_simd.dot4_vnni),
        Dot4("sdot", 4, subtract_128, tile_simd.dot4_sdot, is_signed=True),
        Dot4("avx2", 8, prepare_avx2, dot4_prepared_avx2, True, AVX2_MAX_TOKENS, tile_simd.PAIR_OPS_AVX2),
        Dot4("neon", 4, subtract_128, tile_simd.dot4_neon, True, NEON_MAX_TOKENS, tile_simd.PAIR_OPS_NEON),
    )
}


def choose_dot4(features: str) -> str:
    """Return the name of the instruction set for sums of byte products on a CPU with the given LLVM features.

    It is "avx512vnni", "avxvnni" or "sdot", which have an instruction that adds 4 products, else "avx2", "neon" or "portable".
    """
    required = {"avx512vnni": "+avx512vnni", "avxvnni": "+avxvnni", "avx2": "+avx2", "sdot": "+dotprod", "neon": "+neon"}
    return next((name for name, feature in required.items() if feature in features.split(",")), "portable")
