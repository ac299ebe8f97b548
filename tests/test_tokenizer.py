"""tokenizer.py against a naive reading of run.c, and every file that is no tokenizer."""

import random
import struct
from pathlib import Path

import pytest

from specdec.tokenizer import BOS, EOS, FIRST_BYTE, TextStream, Tokenizer, TokenizerError
from tests.tools.checkpoint_files import (
    CHARACTERS,
    FIRST_PIECE,
    SHARED,
    base_pieces,
    small_pieces,
    tokenizer_bytes,
    tokenizer_damages,
    write_tokenizer,
)

needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs the real tokenizers of ../shared")
TEXTS = [
    "Once upon a time",
    "the then other in the end",
    " ",
    "  two spaces lead",
    "a\nb\n\nc\n",
    "tab\tand\r\n",
    "é日🙂 mé日日 café",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 ñandú Ωμέγα 漢字 𝄞",
    "[bold]x[/bold] [brackets] [/red]",
    "\x00\x1b[31m\x7f",
    "<s></s><unk><0x41>",
]


def naive_encode(pieces: list[bytes], scores: list[float], text: str) -> list[int]:
    """run.c's encode: BOS, a dummy space, characters or their bytes, then the first best merge until there is none."""
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
def test_decoding_an_encoded_text_gives_it_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_the_naive_loop(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == naive_encode(tokenizer.pieces, tokenizer.scores, text)


def test_random_strings_encode_as_the_naive_loop_does(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    alphabet = CHARACTERS + "  thenro" * 3 + "xyß\n"
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 60)))
        assert tokenizer.encode(text) == naive_encode(tokenizer.pieces, tokenizer.scores, text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_of_equal_score_go_from_the_left(tmp_path: Path) -> None:
    """Vocabularies of many merges over few letters, whose scores nearly all tie."""
    rng = random.Random(2)
    for trial in range(60):
        words = {"".join(rng.choices("ab ", k=rng.randrange(2, 6))) for _ in range(20)}
        pieces = [(word.encode(), float(rng.randrange(3))) for word in ["a", "b", " ", *sorted(words)]]
        path = write_tokenizer(tmp_path / f"{trial}.bin", base_pieces() + pieces)
        tokenizer = Tokenizer(path)
        for _ in range(20):
            text = "".join(rng.choices("aab ", k=rng.randrange(1, 40)))
            assert tokenizer.encode(text) == naive_encode(tokenizer.pieces, tokenizer.scores, text), text


def test_a_known_text_has_its_known_tokens(tokenizer: Tokenizer) -> None:
    def ids(*pieces: str) -> list[int]:
        return [tokenizer.pieces.index(piece.encode()) for piece in pieces]

    assert tokenizer.encode("the") == [BOS, *ids(" the")]
    assert tokenizer.encode("then the") == [BOS, *ids(" then", " the")]
    assert tokenizer.encode("mé") == [BOS, *ids(" ", "mé")]
    assert tokenizer.encode("xe") == [BOS, *ids(" "), FIRST_BYTE + ord("x"), *ids("e")]


def test_no_text_is_bos_alone_and_has_no_dummy_space(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == [BOS]
    assert tokenizer.decode([BOS]) == ""


def test_a_character_without_a_piece_falls_back_to_its_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ß")[-2:] == [FIRST_BYTE + byte for byte in "ß".encode()]
    assert tokenizer.encode("\n")[-1] == FIRST_BYTE + 10


def test_a_lone_surrogate_is_no_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="half a character"):
        tokenizer.encode("a\udcffb")


def test_one_leading_space_goes_right_after_bos_and_nowhere_else(tokenizer: Tokenizer) -> None:
    the, two = (tokenizer.pieces.index(piece) for piece in (b" the", b"  "))
    assert tokenizer.decode([BOS, the, the]) == "the the"
    assert tokenizer.decode([the]) == " the"
    assert tokenizer.decode([BOS, two]) == " "
    assert tokenizer.decode([BOS, the, BOS, the, the]) == "thethe the"


def test_a_token_says_the_same_wherever_it_stands_and_a_mark_says_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.says(tokenizer.pieces.index(b" the")) == b" the"
    assert tokenizer.says(FIRST_BYTE + 10) == b"\n"
    assert [tokenizer.says(token) for token in (-1, 0, BOS, EOS, tokenizer.vocab_size)] == [None] * 5


def test_marks_are_not_text(tokenizer: Tokenizer) -> None:
    letter = tokenizer.pieces.index(b"e")
    assert tokenizer.decode([BOS, letter, EOS]) == "e"


def test_a_byte_token_is_its_byte(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([BOS, *(FIRST_BYTE + byte for byte in b"<0x41>\x00~")]) == "<0x41>\x00~"
    assert tokenizer.decode([BOS, *(FIRST_BYTE + byte for byte in "日🙂".encode())]) == "日🙂"


def test_a_stream_gives_characters_whole_and_as_soon_as_they_are(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    tokens = [BOS, *(FIRST_BYTE + byte for byte in "é🙂".encode())]
    assert [stream.push(token) for token in tokens] == ["", "", "é", "", "", "", "🙂"]
    assert stream.end() == ""


def test_a_streamed_text_is_the_decoded_text_whatever_the_tokens(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(200):
        tokens = [BOS, *rng.choices(range(tokenizer.vocab_size), k=rng.randrange(40))]
        stream = TextStream(tokenizer)
        pushed = "".join([stream.push(token) for token in tokens])
        assert pushed + stream.end() == tokenizer.decode(tokens)


def test_a_streamed_story_is_the_decoded_story(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        stream = TextStream(tokenizer)
        assert "".join([stream.push(token) for token in tokenizer.encode(text)]) + stream.end() == text


def test_a_character_that_never_ends_is_a_replacement_mark(tokenizer: Tokenizer) -> None:
    half = FIRST_BYTE + "é".encode()[0]
    assert tokenizer.decode([BOS, half]) == "\ufffd"
    assert tokenizer.decode([BOS, half, FIRST_BYTE + ord("x")]) == "\ufffdx"


def test_looking_ahead_leaves_the_stream_as_it_was(tokenizer: Tokenizer) -> None:
    the = tokenizer.pieces.index(b" the")
    first, second = (FIRST_BYTE + byte for byte in "é".encode())
    stream = TextStream(tokenizer)
    stream.push(BOS)
    assert stream.peek([the, the]) == ["the", " the"]
    assert stream.push(the) == "the"
    assert stream.push(first) == ""
    assert stream.peek([second, the]) == ["é", " the"]
    assert stream.peek([the]) == ["\ufffd the"]
    assert stream.push(second) == "é"
    assert stream.end() == ""


def test_the_file_says_how_many_tokens_there_are(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(small_pieces()) == 300
    assert tokenizer.pieces == [piece for piece, _ in small_pieces()]
    assert tokenizer.scores == [score for _, score in small_pieces()]
    assert tokenizer.pieces[FIRST_PIECE - 1] == b"<0xFF>"


@pytest.mark.parametrize("name", tokenizer_damages())
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path, name: str) -> None:
    damage = tokenizer_damages()[name]
    path = tmp_path / "tok.bin"
    path.write_bytes(damage.spoil(tokenizer_bytes(small_pieces())))
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert damage.word in str(caught.value)


def test_a_file_cut_anywhere_is_refused_or_has_fewer_whole_tokens(tmp_path: Path) -> None:
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


def test_a_piece_longer_than_the_file_promises_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tok.bin"
    path.write_bytes(struct.pack("<I", 3) + tokenizer_bytes(small_pieces())[4:])
    with pytest.raises(TokenizerError, match=r"tok\.bin"):
        Tokenizer(path)


def test_a_missing_tokenizer_and_a_directory_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere\.bin.*No such file"):
        Tokenizer(tmp_path / "nowhere.bin")
    with pytest.raises(TokenizerError, match="directory"):
        Tokenizer(tmp_path)


@needs_shared
@pytest.mark.parametrize(("name", "size"), [("tok512.bin", 512), ("tokenizer.bin", 32000)])
def test_real_tokenizers_encode_as_the_naive_loop_does(name: str, size: int) -> None:
    tokenizer = Tokenizer(SHARED / "models" / name)
    assert tokenizer.vocab_size == size
    texts = [*TEXTS, *(SHARED / "text" / "tinystories_cased_valid_split.txt").read_text("utf-8")[:6000].splitlines()]
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokens == naive_encode(tokenizer.pieces, tokenizer.scores, text)
        assert tokenizer.decode(tokens) == text


@needs_shared
def test_llama_tokens_of_a_known_prompt() -> None:
    """The ids that Llama 2's own tokenizer gives."""
    tokenizer = Tokenizer(SHARED / "models" / "tokenizer.bin")
    assert tokenizer.encode("Once upon a time") == [1, 9038, 2501, 263, 931]
    assert tokenizer.encode("I believe the meaning of life is") == [1, 306, 4658, 278, 6593, 310, 2834, 338]
