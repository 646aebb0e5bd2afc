"""Token ids read back as the bytes they were made from, or the tokenizer is said not to be invertible."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from trimtab_core.model_card import ModelCard
from trimtab_core.token_table import UnknownToken
from trimtab_sidecar.token_pieces import NotInvertible, read_token_pieces

TINY = Path(__file__).parents[3] / "lab" / "trimtab_lab" / "data" / "tiny_model" / "tokenizer.json"
TEXTS = (
    "Plain words, and more of them.",
    "  spaces \t tabs\r\n\n\nlines  ",
    "naïve 東京 Ελλάδα नमस्ते שלום 👩‍🚀 \u0000\u007f\ufeff\u2028",
    "e\u0301 A\u030a ﬁ \u1112\u1161\u11ab <s>\u0338x</s>",
    "def f(x):\n    return {'a': x ** 2}  # <0x41> \\n",
    "\u2581 is a mark, and \u2581\u2581 too",
)


def parsed(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())


def byte_level(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """As Gemma has it: spaces become U+2581, and bytes are the way out."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("\u2581", "a", "e", "n", "d", "an", "and", "\u2581and", "東京", "\u2581\u2581"):
        vocabulary[piece] = len(vocabulary)
    merges = [("a", "n"), ("an", "d"), ("\u2581", "and"), ("\u2581", "\u2581")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer.from_file(str(TINY)),
        byte_level(),
        byte_level(normalizer=normalizers.NFC()),
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
            )
        ),
        sentence_piece(),
    ],
    ids=["tiny", "byte level", "nfc", "sequence", "sentence piece"],
)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_are_the_text_as_the_card_normalises_it(tokenizer: Tokenizer, text: str) -> None:
    pieces = read_token_pieces(parsed(tokenizer))
    card = ModelCard(
        table=pieces.table,
        normalizer=pieces.normalizer,
        space_marker=pieces.space_marker,
        added_tokens=pieces.added_tokens,
    )
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert card.text_of_tokens(ids) == card.normalize(text)


def test_every_id_of_the_vocabulary_has_bytes() -> None:
    tokenizer = Tokenizer.from_file(str(TINY))
    table = read_token_pieces(parsed(tokenizer)).table
    assert len(table) == tokenizer.get_vocab_size()
    assert len(table.invalid) == 0


def test_an_added_token_that_strips_spaces_has_no_bytes_and_is_named() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True), AddedToken("<mask>", lstrip=True)])
    pieces = read_token_pieces(parsed(tokenizer))
    assert pieces.stripping_tokens == ("<mask>", "<|user|>")
    with pytest.raises(UnknownToken):
        pieces.table.bytes_of(np.array([tokenizer.token_to_id("<|user|>")], dtype=np.uint32))
    assert pieces.table.bytes_of(np.array([tokenizer.token_to_id("<s>")], dtype=np.uint32)) == b"<s>"


def without_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")), "WordPiece"),
        (Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")), "WordLevel"),
        (Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)), "lost"),
        (Tokenizer(models.BPE({"a": 0}, [], end_of_word_suffix="</w>")), "marks"),
        (without_bytes(), "254 of the 256 bytes"),
        (byte_level(normalizer=normalizers.NFKC()), "NFKC"),
        (byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])), "Lowercase"),
        (byte_level(normalizer=normalizers.Strip()), "Strip"),
        (byte_level(normalizer=normalizers.Replace("\r\n", "\n")), "Replace"),
        (byte_level(normalizer=normalizers.Prepend("\u2581")), "dummy prefix"),
        (byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), "dummy prefix"),
        (byte_level(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")), "dummy prefix"),
        (byte_level(pre_tokenizer=pre_tokenizers.Split(" ", "removed")), "removes text"),
        (byte_level(pre_tokenizer=pre_tokenizers.Whitespace()), "removes text"),
    ],
)
def test_a_tokenizer_that_loses_something_is_not_invertible_and_says_why(tokenizer: Tokenizer, reason: str) -> None:
    with pytest.raises(NotInvertible, match=reason):
        read_token_pieces(parsed(tokenizer))


def test_byte_fallback_without_all_bytes_is_not_invertible() -> None:
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(255)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    with pytest.raises(NotInvertible, match="1 of the 256 bytes"):
        read_token_pieces(parsed(tokenizer))


@pytest.mark.parametrize("broken", [{}, {"model": {"type": "BPE"}}, {"model": {"type": "BPE", "vocab": []}}])
def test_what_is_no_tokenizer_is_not_invertible(broken: dict[str, Any]) -> None:
    with pytest.raises(NotInvertible):
        read_token_pieces(broken)
