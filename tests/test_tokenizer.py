"""Tests of tokenizer.py against a naive implementation of run.c, and with damaged files."""

import random
import struct
from pathlib import Path

import pytest

from specdec.tokenizer import BOS, EOS, FIRST_BYTE, StreamingDetokenizer, Tokenizer, TokenizerError
from tests.tools.checkpoint_files import (
    CHARACTERS,
    FIRST_TEXT_TOKEN,
    SHARED,
    base_pieces,
    make_tokenizer_corruptions,
    small_pieces,
    tokenizer_bytes,
    write_tokenizer,
)
from tests.tools.tokenizer_files import TEXTS

needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs the real tokenizers of ../shared")


def naive_encode(pieces: list[bytes], scores: list[float], text: str) -> list[int]:
    """Encode like run.c: BOS, a dummy space, characters or their bytes, then the first best merge until none is left."""
    ids: dict[bytes, int] = {}
    for token, piece in enumerate(pieces):
        ids.setdefault(piece, token)
    if not text:
        return [1]
    tokens: list[int] = []
    for character in " " + text:
        raw = character.encode()
        tokens += [ids[raw]] if raw in ids else [byte + 3 for byte in raw]
    while True:
        best_score, best_id, best_at = -1e10, -1, -1
        for at in range(len(tokens) - 1):
            token = ids.get(pieces[tokens[at]] + pieces[tokens[at + 1]], -1)
            if token != -1 and scores[token] > best_score:
                best_score, best_id, best_at = scores[token], token, at
        if best_at < 0:
            return [1, *tokens]
        tokens[best_at : best_at + 2] = [best_id]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_encoded_like_the_naive_loop_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    tokens, stream = tokenizer.encode(text), StreamingDetokenizer(tokenizer)
    assert tokens == naive_encode(tokenizer.pieces, tokenizer.scores, text)
    assert tokenizer.decode(tokens) == text == "".join([stream.push(token) for token in tokens]) + stream.flush()


def test_encoding_random_strings_equals_the_naive_loop(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    alphabet = CHARACTERS + "  thenro" * 3 + "xyß\n"
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 60)))
        assert tokenizer.encode(text) == naive_encode(tokenizer.pieces, tokenizer.scores, text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_of_equal_score_are_leftmost_first(tmp_path: Path) -> None:
    """Uses vocabularies of many merges over few letters, so nearly all scores tie."""
    rng = random.Random(2)
    for trial in range(60):
        words = {"".join(rng.choices("ab ", k=rng.randrange(2, 6))) for _ in range(20)}
        pieces = [(word.encode(), float(rng.randrange(3))) for word in ["a", "b", " ", *sorted(words)]]
        path = write_tokenizer(tmp_path / f"{trial}.bin", base_pieces() + pieces)
        tokenizer = Tokenizer(path)
        for _ in range(20):
            text = "".join(rng.choices("aab ", k=rng.randrange(1, 40)))
            assert tokenizer.encode(text) == naive_encode(tokenizer.pieces, tokenizer.scores, text), text


def test_known_texts_have_known_tokens(tokenizer: Tokenizer) -> None:
    def ids(*pieces: str) -> list[int]:
        return [tokenizer.pieces.index(piece.encode()) for piece in pieces]

    assert tokenizer.encode("the") == [BOS, *ids(" the")]
    assert tokenizer.encode("then the") == [BOS, *ids(" then", " the")]
    assert tokenizer.encode("mé") == [BOS, *ids(" ", "mé")]
    assert tokenizer.encode("xe") == [BOS, *ids(" "), FIRST_BYTE + ord("x"), *ids("e")]
    assert tokenizer.encode("") == [BOS] and tokenizer.decode([BOS]) == ""  # without a dummy space
    assert tokenizer.encode("ß")[-2:] == [FIRST_BYTE + byte for byte in "ß".encode()]
    assert tokenizer.encode("\n")[-1] == FIRST_BYTE + 10


def test_a_lone_surrogate_is_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="half a character"):
        tokenizer.encode("a\udcffb")


def test_token_to_bytes_returns_none_for_special_tokens_and_unknown_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_bytes(tokenizer.pieces.index(b" the")) == b" the"
    assert tokenizer.token_to_bytes(FIRST_BYTE + 10) == b"\n"
    assert [tokenizer.token_to_bytes(token) for token in (-1, 0, BOS, EOS, tokenizer.vocab_size)] == [None] * 5


def test_a_stream_returns_characters_as_soon_as_they_are_complete(tokenizer: Tokenizer) -> None:
    stream = StreamingDetokenizer(tokenizer)
    tokens = [BOS, *(FIRST_BYTE + byte for byte in "é🙂".encode())]
    assert [stream.push(token) for token in tokens] == ["", "", "é", "", "", "", "🙂"]
    assert stream.flush() == ""


def test_streaming_random_tokens_equals_decode(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(200):
        tokens = [BOS, *rng.choices(range(tokenizer.vocab_size), k=rng.randrange(40))]
        stream = StreamingDetokenizer(tokenizer)
        pushed = "".join([stream.push(token) for token in tokens])
        assert pushed + stream.flush() == tokenizer.decode(tokens)


def test_known_tokens_have_known_texts(tokenizer: Tokenizer) -> None:
    """One space behind BOS is removed; special tokens have no text; half a character becomes a replacement character."""
    the, two, letter = (tokenizer.pieces.index(piece) for piece in (b" the", b"  ", b"e"))
    half, *_ = (FIRST_BYTE + byte for byte in "é".encode())
    for tokens, text in (
        ([BOS, the, the], "the the"), ([the], " the"), ([BOS, two], " "), ([BOS, the, BOS, the, the], "thethe the"),
        ([BOS, letter, EOS], "e"), ([BOS, *(FIRST_BYTE + byte for byte in b"<0x41>\x00~")], "<0x41>\x00~"),
        ([BOS, *(FIRST_BYTE + byte for byte in "日🙂".encode())], "日🙂"),
        ([BOS, half], "\ufffd"), ([BOS, half, FIRST_BYTE + ord("x")], "\ufffdx"),
    ):  # fmt: skip
        assert tokenizer.decode(tokens) == text


def test_peek_does_not_change_the_stream(tokenizer: Tokenizer) -> None:
    the = tokenizer.pieces.index(b" the")
    first, second = (FIRST_BYTE + byte for byte in "é".encode())
    stream = StreamingDetokenizer(tokenizer)
    stream.push(BOS)
    assert stream.peek([the, the]) == ["the", " the"]
    assert stream.push(the) == "the"
    assert stream.push(first) == ""
    assert stream.peek([second, the]) == ["é", " the"]
    assert stream.peek([the]) == ["\ufffd the"]
    assert stream.push(second) == "é"
    assert stream.flush() == ""


def test_the_vocabulary_is_what_the_file_contains(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(small_pieces()) == 300
    assert tokenizer.pieces == [piece for piece, _ in small_pieces()]
    assert tokenizer.scores == [score for _, score in small_pieces()]
    assert tokenizer.pieces[FIRST_TEXT_TOKEN - 1] == b"<0xFF>"


@pytest.mark.parametrize("name", make_tokenizer_corruptions())
def test_a_damaged_file_is_rejected_by_name(tmp_path: Path, name: str) -> None:
    damage = make_tokenizer_corruptions()[name]
    path = tmp_path / "tok.bin"
    path.write_bytes(damage.corrupt(tokenizer_bytes(small_pieces())))
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert damage.expected_word in str(caught.value)


def test_a_truncated_file_is_rejected_or_has_fewer_tokens(tmp_path: Path) -> None:
    pieces = small_pieces()[:20]
    data = tokenizer_bytes(pieces)
    ends = {4 + sum(8 + len(piece) for piece, _ in pieces[:n]): n for n in range(3, len(pieces) + 1)}
    path = tmp_path / "tok.bin"
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        if cut in ends:
            assert Tokenizer(path).vocab_size == ends[cut]
        else:
            with pytest.raises(TokenizerError, match=r"tok\.bin"):
                Tokenizer(path)


def test_a_piece_longer_than_the_header_declares_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "tok.bin"
    path.write_bytes(struct.pack("<I", 3) + tokenizer_bytes(small_pieces())[4:])
    with pytest.raises(TokenizerError, match=r"tok\.bin"):
        Tokenizer(path)


def test_a_missing_file_and_a_directory_are_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere\.bin.*No such file"):
        Tokenizer(tmp_path / "nowhere.bin")
    with pytest.raises(TokenizerError, match="directory"):
        Tokenizer(tmp_path)


@needs_shared
@pytest.mark.parametrize(("name", "size"), [("tok512.bin", 512), ("tokenizer.bin", 32000)])
def test_real_tokenizers_encode_like_the_naive_loop(name: str, size: int) -> None:
    tokenizer = Tokenizer(SHARED / "models" / name)
    assert tokenizer.vocab_size == size
    texts = [*TEXTS, *(SHARED / "text" / "tinystories_cased_valid_split.txt").read_text("utf-8")[:6000].splitlines()]
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokens == naive_encode(tokenizer.pieces, tokenizer.scores, text)
        assert tokenizer.decode(tokens) == text


@needs_shared
def test_llama_2_tokens_of_known_prompts() -> None:
    """The expected ids are from Llama 2's own tokenizer."""
    tokenizer = Tokenizer(SHARED / "models" / "tokenizer.bin")
    assert tokenizer.encode("Once upon a time") == [1, 9038, 2501, 263, 931]
    assert tokenizer.encode("I believe the meaning of life is") == [1, 306, 4658, 278, 6593, 310, 2834, 338]
