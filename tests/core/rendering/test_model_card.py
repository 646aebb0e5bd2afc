"""Model cards travel, name themselves by content, and spell text as the engine's tokens do."""

import dataclasses

import msgspec
import pytest

from trimtab_core.errors import DataError
from trimtab_core.model_card import ModelCard
from trimtab_core.not_renderable import NotRenderable
from trimtab_core.token_table import TokenTable

TABLE = TokenTable.from_pieces([b"Hello", b" w", b"\xc3", b"\xa9", None])
CARD = ModelCard(
    template="{{ messages }}",
    tools_template="{{ tools }}",
    content_format="string",
    tools_content_format="openai",
    default_template_kwargs={"z": 1, "a": {"y": [None, True], "b": "é"}},
    exclude_tools_when_tool_choice_none=True,
    special_tokens={"eos_token": "</s>", "bos_token": "<s>"},
    chat_prefix="",
    completion_prefix="<s>",
    normalizer="nfc",
    added_tokens=("<s>", "</s>"),
    tokens_per_byte=0.31,
    image_tokens=576,
    block_tokens=32,
    table=TABLE,
    exact=True,
    reason="",
)


def test_a_card_is_itself_again_after_the_shared_state() -> None:
    again = ModelCard.decode(CARD.encode())
    assert dataclasses.replace(again, table=None) == dataclasses.replace(CARD, table=None)
    assert again.digest() == CARD.digest()
    assert again.text_of_tokens([0, 1, 2, 3]) == "Hello wé".encode()


def test_the_order_of_a_default_object_is_kept_since_templates_print_it() -> None:
    again = ModelCard.decode(CARD.encode())
    assert list(again.default_template_kwargs["a"]) == ["y", "b"]


def test_one_template_for_both_is_stored_once() -> None:
    both = dataclasses.replace(CARD, tools_template=CARD.template)
    assert ModelCard.decode(both.encode()).tools_template == CARD.template
    assert len(both.encode()) < len(CARD.encode())


@pytest.mark.parametrize(
    "change",
    [
        {"template": "{{ message }}"},
        {"tools_content_format": "string"},
        {"default_template_kwargs": {}},
        {"exclude_tools_when_tool_choice_none": False},
        {"special_tokens": {}},
        {"completion_prefix": ""},
        {"normalizer": "none"},
        {"space_marker": True},
        {"table": None},
        {"exact": False},
    ],
)
def test_whatever_changes_a_rendering_changes_the_digest(change: dict[str, object]) -> None:
    assert dataclasses.replace(CARD, **change).digest() != CARD.digest()


def test_the_order_of_special_tokens_does_not_change_the_digest() -> None:
    turned = {"bos_token": "<s>", "eos_token": "</s>"}
    assert dataclasses.replace(CARD, special_tokens=turned).digest() == CARD.digest()


def broken(**change: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(CARD.encode()), **change})


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        CARD.encode()[:-7],
        broken(version=2),
        broken(template=3),
        broken(content_format="xml"),
        broken(normalizer="nfkc"),
        broken(default_template_kwargs="[1]"),
        broken(default_template_kwargs="[" * 100_000),
        broken(tokens_per_byte=0.0),
        broken(block_tokens=0),
        broken(table=b"TTB1junk"),
    ],
)
def test_bytes_that_are_no_card_are_a_data_error(packed: bytes) -> None:
    with pytest.raises(DataError):
        ModelCard.decode(packed)


def test_fields_that_a_later_version_adds_are_skipped() -> None:
    assert ModelCard.decode(broken(colour="blue")).digest() == CARD.digest()


def test_nfc_stops_at_added_tokens() -> None:
    assert CARD.normalize("e\u0301 <s>\u0338 A\u030a") == "é <s>\u0338 Å".encode()
    assert dataclasses.replace(CARD, added_tokens=()).normalize("<s>\u0338") == "<s\u226f".encode()


def test_the_longest_of_the_added_tokens_that_start_at_a_place_counts() -> None:
    card = dataclasses.replace(CARD, added_tokens=("<a", "<a>", "a>b"))
    assert card.normalize("<a>\u0338") == "<a>\u0338".encode()


def test_no_normaliser_changes_nothing() -> None:
    assert ModelCard().normalize("e\u0301 \u2581") == "e\u0301 \u2581".encode()


def test_the_mark_for_a_space_reads_as_a_space() -> None:
    assert ModelCard(space_marker=True).normalize("a\u2581b") == b"a b"


def test_a_lone_surrogate_is_a_refusal() -> None:
    for card in (CARD, ModelCard()):
        with pytest.raises(NotRenderable):
            card.normalize("a\ud800b")


@pytest.mark.parametrize("ids", [[4], [5], [-1], [1 << 40], ["x"], [[0, 1], [2]]])
def test_token_ids_without_bytes_are_a_refusal(ids: list[object]) -> None:
    with pytest.raises(NotRenderable):
        CARD.text_of_tokens(ids)  # type: ignore[arg-type]
    with pytest.raises(NotRenderable):
        ModelCard().text_of_tokens([0])
