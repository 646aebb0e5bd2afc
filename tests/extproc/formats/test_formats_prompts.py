"""Prompts as chains of chunks: exact, approximate, and unclaimed."""

import json
from datetime import datetime
from typing import Any

import pytest
from format_cards import SIMPLE_TEMPLATE, exact_card

from trimtab_core.chunks import CHUNK_BYTES, hash_chunks, root_hash
from trimtab_core.rendering import RenderClock, RenderLimits
from trimtab_extproc.formats import ParsedRequest, parse_request, prompts_for, rendering_for
from trimtab_extproc.formats.canonical import canonical_bytes
from trimtab_extproc.formats.inline_system import STEPS_MAX, wants_system_first

SEED = 99
LONG = "All work and no play makes a dull picker. " * 8


def parse(path: str, **body: Any) -> ParsedRequest:
    return parse_request("POST", path, {}, json.dumps(body, ensure_ascii=False).encode())


def chat(*messages: dict[str, Any], **fields: Any) -> ParsedRequest:
    return parse("/v1/chat/completions", messages=list(messages), **fields)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chain(text: bytes, lora: str | None = None, salt: str | None = None) -> list[int]:
    return hash_chunks(text, root_hash(SEED, lora, salt), SEED).tolist()


def canonical(parsed: ParsedRequest) -> bytes:
    (source,) = parsed.sources
    return canonical_bytes(source)


def test_an_exact_card_gives_the_chunks_of_the_rendered_text() -> None:
    text = f"<|im_start|>user\n{LONG}<|im_end|>\n<|im_start|>assistant\n".encode()
    rendering = rendering_for(chat(user(LONG)), exact_card(), None, SEED)
    (prompt,) = rendering.prompts
    assert (rendering.is_exact, rendering.reason) == (True, "")
    assert (prompt.chain.tolist(), prompt.size_bytes, prompt.tokens) == (chain(text), len(text), None)


def test_text_is_normalised_as_the_tokenizer_does_it() -> None:
    (composed,) = prompts_for(parse("/v1/completions", prompt="\u00e9" * 64), exact_card(), None, SEED)
    (combining,) = prompts_for(parse("/v1/completions", prompt="e\u0301" * 64), exact_card(), None, SEED)
    assert len(composed.chain) == 2
    assert composed.chain.tolist() == combining.chain.tolist()


def test_lora_and_salt_are_the_root_of_the_chain() -> None:
    parsed = chat(user(LONG), cache_salt="s")
    text = f"<|im_start|>user\n{LONG}<|im_end|>\n<|im_start|>assistant\n".encode()
    (prompt,) = prompts_for(parsed, exact_card(), "adapter", SEED)
    assert prompt.chain.tolist() == chain(text, "adapter", "s")
    chains = {tuple(chain(text, lora, salt)) for lora in (None, "adapter") for salt in (None, "s")}
    assert len(chains) == 4


def test_a_completion_gets_the_text_that_the_engine_puts_in_front() -> None:
    card = exact_card(completion_prefix="<s>")
    texts = {True: b"<s>" + LONG.encode(), False: LONG.encode()}
    for special, text in texts.items():
        (prompt,) = prompts_for(parse("/v1/completions", prompt=LONG, add_special_tokens=special), card, None, SEED)
        assert (prompt.chain.tolist(), prompt.size_bytes) == (chain(text), len(text))


def test_a_chat_may_ask_for_that_text_too() -> None:
    card = exact_card(completion_prefix="<s>")
    (without,) = prompts_for(chat(user(LONG)), card, None, SEED)
    (with_it,) = prompts_for(chat(user(LONG), add_special_tokens=True), card, None, SEED)
    assert with_it.size_bytes == without.size_bytes + len("<s>")


def test_token_ids_become_their_bytes_and_their_number_is_known() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8] * 20
    (prompt,) = prompts_for(parse("/v1/completions", prompt=ids), exact_card(), None, SEED)
    assert (prompt.chain.tolist(), prompt.size_bytes, prompt.tokens) == (chain(b"abcdefgh" * 20), 160, 160)


@pytest.mark.parametrize("unknown", [0, 9, 2**32 - 1])
def test_an_id_without_known_bytes_claims_nothing_but_the_number_of_tokens(unknown: int) -> None:
    parsed = parse("/v1/completions", prompt=[[1] * 200, [1] * 200 + [unknown]])
    rendering = rendering_for(parsed, exact_card(), None, SEED)
    known, other = rendering.prompts
    assert (len(known.chain), len(other.chain), other.tokens) == (3, 0, 201)
    assert rendering.reason == "the prompt holds token ids without known bytes"


def test_prompts_keep_the_clients_order() -> None:
    parsed = parse("/v1/completions", prompt=["a" * 64, "b" * 64, "c" * 64], n=2)
    prompts = prompts_for(parsed, exact_card(), None, SEED)
    assert [prompt.chain.tolist() for prompt in prompts] == [chain(letter * 64) for letter in (b"a", b"b", b"c")]
    assert parsed.sequences == 6


@pytest.mark.parametrize("card", [None, exact_card(exact=False, reason="mistral")])
def test_without_an_exact_card_the_chunks_are_of_the_canonical_text_and_that_is_said(card: Any) -> None:
    parsed = chat(user(LONG))
    rendering = rendering_for(parsed, card, None, SEED)
    (prompt,) = rendering.prompts
    assert (rendering.is_exact, rendering.reason) == (False, "no card" if card is None else "mistral")
    assert (prompt.chain.tolist(), prompt.size_bytes) == (chain(canonical(parsed)), len(canonical(parsed)))


@pytest.mark.parametrize("card", [None, exact_card()])
@pytest.mark.parametrize(
    "parsed",
    [
        chat(user(LONG), truncate_prompt_tokens=8),
        chat(user(LONG), chat_template="{{ 1 }}"),
        parse("/v1/completions", prompt=LONG, suffix="x"),
        parse("/v1/responses", input=LONG, previous_response_id="resp_1"),
        parse("/v1/score", queries="q", documents=[LONG]),
    ],
)
def test_what_claims_no_prefix_has_a_size_and_no_chunks(parsed: ParsedRequest, card: Any) -> None:
    (prompt,) = prompts_for(parsed, card, None, SEED)
    assert len(prompt.chain) == 0
    assert prompt.size_bytes >= len(LONG)


def test_a_request_that_nobody_understood_has_no_prompts() -> None:
    assert prompts_for(parse("/tokenize", prompt=LONG), exact_card(), None, SEED) == ()


def test_what_the_template_refuses_claims_nothing_and_the_reason_is_given() -> None:
    card = exact_card("{{ raise_exception('no') }}")
    rendering = rendering_for(chat(user(LONG)), card, None, SEED)
    (prompt,) = rendering.prompts
    assert (len(prompt.chain), rendering.is_exact) == (0, True)
    assert prompt.size_bytes >= len(LONG)
    assert rendering.reason == "the template refused the request (TemplateError)"


def test_a_rendering_past_its_limits_claims_nothing() -> None:
    parsed = chat(user(LONG))
    small = RenderLimits(output_bytes=10)
    assert len(rendering_for(parsed, exact_card(), None, SEED, limits=small).prompts[0].chain) == 0
    ticks = iter(range(10**9))
    clock = RenderClock(monotonic=lambda: float(next(ticks)), local_time=lambda: datetime(2026, 1, 2))
    slow = exact_card("{% for i in range(9999) %}{{ messages[0] }}{% endfor %}")
    rendering = rendering_for(parsed, slow, None, SEED, limits=RenderLimits(time_s=2.0), clock=clock)
    assert (len(rendering.prompts[0].chain), rendering.reason) == (0, "rendering took too long")


def test_the_first_image_ends_the_chain_and_its_data_is_no_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    parsed = chat({"role": "system", "content": LONG}, user([{"type": "text", "text": LONG}, image]))
    card = exact_card(image_tokens=500, tokens_per_byte=0.25)
    (prompt,) = prompts_for(parsed, card, None, SEED)
    head = f"<|im_start|>system\n{LONG}<|im_end|>\n<|im_start|>user\n".encode()
    assert prompt.chain.tolist() == chain(head)
    assert 2 * len(LONG) + 2000 <= prompt.size_bytes < 2 * len(LONG) + 2200
    # Where the pool has measured its own rate, the same tokens are other bytes.
    (measured,) = rendering_for(parsed, card, None, SEED, tokens_per_byte=0.125).prompts
    assert measured.size_bytes - prompt.size_bytes == 2000


def test_a_server_default_does_not_reach_conversations_to_embed() -> None:
    card = exact_card("{{ style | default('plain') * 20 }}", default_template_kwargs={"style": "fancy"})
    (embedded,) = prompts_for(parse("/v1/embeddings", messages=[user("a")]), card, None, SEED)
    (chatted,) = prompts_for(chat(user("a")), card, None, SEED)
    assert (embedded.chain.tolist(), chatted.chain.tolist()) == (chain(b"plain" * 20), chain(b"fancy" * 20))


# The canonical form.


def turns(count: int) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for turn in range(count):
        made += [user(f"Question {turn}: {LONG}"), {"role": "assistant", "content": f"Answer {turn}."}]
    return made


@pytest.mark.parametrize("fields", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_a_longer_conversation_has_the_shorter_ones_bytes_in_front(fields: dict[str, Any]) -> None:
    shorter, longer = (canonical(chat(*turns(count), **fields)) for count in (3, 4))
    assert longer.startswith(shorter)
    assert len(longer) > len(shorter) + CHUNK_BYTES


def test_tools_stand_before_the_messages_since_templates_put_them_there() -> None:
    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    one, other = (canonical(chat(*turns(1), tools=[tool(name)])) for name in ("first", "other"))
    common = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert common < one.index(b"Be brief.")


def test_the_form_of_text_content_does_not_matter() -> None:
    assert canonical(chat(user("a"))) == canonical(chat(user([{"type": "text", "text": "a"}])))


def test_two_images_differ_and_one_image_stays_the_same() -> None:
    def image(data: str) -> ParsedRequest:
        return chat(user([{"type": "image_url", "image_url": {"url": "data:" + data * 5000}}]))

    assert canonical(image("A")) == canonical(image("A")) != canonical(image("B"))
    assert len(canonical(image("A"))) < 64


def test_a_message_cannot_imitate_two() -> None:
    assert canonical(chat(user("a"), user("b"))) != canonical(chat(user("a\x1euser\x1fb")))


def test_token_ids_have_four_bytes_each_and_prefixes_stay_prefixes() -> None:
    short, long = (canonical(parse("/v1/completions", prompt=[7] * count)) for count in (16, 32))
    assert (len(short), long.startswith(short)) == (64, True)
    (prompt,) = prompts_for(parse("/v1/completions", prompt=[7] * 32), None, None, SEED)
    assert (len(prompt.chain), prompt.tokens) == (2, 32)


# System messages inside a conversation.


@pytest.mark.parametrize(
    ("template", "first"),
    [
        (SIMPLE_TEMPLATE, False),
        (None, True),
        ("", True),
        ("{{ raise_exception('always') }}", True),
        ("{% if messages[2].role == 'system' %}{{ raise_exception('system first') }}{% endif %}", True),
        ("{% for m in messages %}{{ m.content + bos_token }}{% endfor %}", True),
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{{ strftime_now('%Y') }}", True),
        ("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}", False),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", True),
        ("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}", False),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{{ a + b }}{% endfor %}{% endfor %}", True),
        ("{% if", True),
    ],
)
def test_a_template_shows_whether_it_takes_system_messages_later_on(template: str | None, first: bool) -> None:
    assert wants_system_first(exact_card(template)) is first  # type: ignore[arg-type]


def test_either_template_can_ask_for_system_messages_in_front() -> None:
    assert wants_system_first(exact_card(SIMPLE_TEMPLATE, tools_template="{{ raise_exception('no') }}"))


def test_the_test_of_a_template_is_bounded() -> None:
    half = STEPS_MAX // 2
    for body, is_much in (("", False), ("{{ messages[0].role }}", True)):
        template = f"{{% for a in range({half}) %}}{body}{{% endfor %}}"
        assert wants_system_first(exact_card(template)) is is_much
