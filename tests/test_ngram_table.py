"""Tables of n-grams: counted as a dictionary counts them, written and read back, and every bad file told in a line."""

import struct
from collections import Counter, defaultdict

import numpy as np
import pytest

from specdec.drafting.ngram_table import HEADER, MAGIC, check_place, count, is_table, load_table, save_table
from specdec.readers import CheckpointError

TEXTS = [[1, 5, 6, 7, 5, 6, 8, 5, 6, 7], [5, 6], [], [9], [2, 5, 6, 7]]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "table.ngrams"
    save_table(count(TEXTS, 10), path)
    return path


def test_a_table_says_what_mostly_followed():
    table = count(TEXTS, 10)
    assert table.after(5, 6) == (7, int(255 * 3 / 5) / 255)
    assert table.after(0, 6) == (7, int(255 * 3 / 5) / 255)  # of 6 alone
    assert table.after(-1, 5) == (6, int(255 * 5 / 6) / 255)
    assert table.after(1, 9) == (-1, 0.0)
    assert table.after(-1, -1) == (-1, 0.0)


def test_a_table_of_random_texts_is_that_of_a_dictionary():
    rng = np.random.default_rng(1)
    for vocab in (1, 2, 7, 300):
        texts = [rng.integers(0, vocab, rng.integers(0, 200)).tolist() for _ in range(20)] + [[0, 0]]
        following = defaultdict(Counter)
        for text in texts:
            for i in range(1, len(text)):
                following[(text[i - 1],)][text[i]] += 1
                if i > 1:
                    following[(text[i - 2], text[i - 1])][text[i]] += 1
        table, n = count(texts, vocab), 0
        for context, counts in following.items():
            total = sum(counts.values())
            if len(context) == 2 and total < 2:
                assert table.after(*context) == table.after(-1, context[1])
                continue
            n += 1
            best = min(counts, key=lambda token: (-counts[token], token))
            assert table.after(*(-1, *context)[-2:]) == (best, max(1, int(255 * counts[best] / (total + 1))) / 255)
        assert table.keys.size == n


def test_a_table_is_read_as_it_was_written_and_replaces_another(path):
    table, again = count(TEXTS, 10), load_table(path)
    assert is_table(path)
    for name in ("keys", "tokens", "shares"):
        np.testing.assert_array_equal(getattr(table, name), getattr(again, name))
    check_place(path)
    save_table(count([[1, 2]], 10), path)
    assert load_table(path).after(-1, 1)[0] == 2
    assert [file.name for file in path.parent.iterdir()] == ["table.ngrams"]


def with_field(data, at, kind, value):
    return data[:at] + struct.pack(kind, value) + data[at + struct.calcsize(kind) :]


N = count(TEXTS, 10).keys.size
TOKENS, SHARES = HEADER.size + 8 * N, HEADER.size + 12 * N


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "no table of n-grams"),
        (lambda data: data[: HEADER.size - 1], "no table of n-grams"),
        (lambda data: b"x" + data[1:], "no table of n-grams"),
        (lambda data: with_field(data, 8, "<I", 2), "version 2"),
        (lambda data: with_field(data, 12, "<I", 0), "a vocabulary of 0 tokens"),
        (lambda data: with_field(data, 12, "<I", 2**31), "a vocabulary of 2147483648 tokens"),
        (lambda data: with_field(data, 12, "<I", 2), "not in order, or none of 2"),
        (lambda data: with_field(data, 16, "<Q", 2**63), "is it whole"),
        (lambda data: data[:-1], "is it whole"),
        (lambda data: data + b"x", "is it whole"),
        (lambda data: with_field(data, HEADER.size, "<q", -1), "not in order"),
        (lambda data: with_field(data, HEADER.size + 8, "<q", 0), "not in order"),
        (lambda data: with_field(data, TOKENS - 8, "<q", 110), "none of 10 tokens"),
        (lambda data: with_field(data, TOKENS, "<I", 10), "token 10 of a vocabulary of 10"),
        (lambda data: with_field(data, SHARES, "<B", 0), "a share"),
        (lambda data: with_field(data, SHARES, "<B", 255), "a share"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(path, damage, words):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=words) as told:
        load_table(path)
    assert str(path) in str(told.value)
    assert "\n" not in str(told.value)


def test_what_cannot_be_counted_is_told():
    for texts, vocab, words in (
        ([], 10, "nothing to count"),
        ([[3]], 10, "nothing to count"),
        ([[3, 10]], 10, "token 10"),
        ([[3, 4]], 2**21, "at most"),
    ):
        with pytest.raises(ValueError, match=words):
            count(texts, vocab)


def test_nothing_but_a_table_is_overwritten(path, tmp_path):
    story = tmp_path / "story.txt"
    story.write_text("Once")
    for place, words in (
        (story, "is left as it is"),
        (tmp_path, "is left as it is"),
        (tmp_path / "nowhere" / "x.ngrams", "cannot write"),
        (story / "x.ngrams", "cannot write"),
    ):
        with pytest.raises(ValueError, match=words):
            check_place(place)
    with pytest.raises(ValueError, match="cannot write"):
        save_table(load_table(path), tmp_path / "nowhere" / "x.ngrams")
    assert story.read_text() == "Once"
    assert not is_table(tmp_path)
    assert MAGIC not in story.read_bytes()
