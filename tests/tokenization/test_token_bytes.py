"""Bytes of tokens: GPT-2's alphabet, byte tokens and pieces with space markers."""

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from foredraft.tokenization.token_bytes import parse_byte_token, spell_byte_level, spell_piece


def test_the_alphabet_is_that_of_the_tokenizers_library():
    letters = ByteLevel.alphabet()
    assert sorted(spell_byte_level(letter)[0] for letter in letters) == list(range(256))
    splitter = ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("a b\n\t", "é漢", "\x00\x7f\xad"):
        ((piece, _),) = splitter.pre_tokenize_str(text)
        assert spell_byte_level(piece) == text.encode()


def test_a_letter_outside_the_alphabet_is_no_byte():
    assert spell_byte_level("<|end▁of|>") is None
    assert spell_byte_level("") == b""


@pytest.mark.parametrize(("name", "byte"), [("<0x0A>", 10), ("<0xff>", 255), ("<0xZZ>", None), ("<0x0A", None)])
def test_byte_tokens_have_two_hexadecimal_digits(name, byte):
    assert parse_byte_token(name) == byte
    assert spell_piece(name) == (name.encode() if byte is None else bytes([byte]))


def test_a_space_marker_is_a_space():
    assert spell_piece("▁the▁end") == b" the end"
