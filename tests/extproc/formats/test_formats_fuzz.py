"""Whatever a client sends: `parse_request` returns, and so does the rendering, with as many prompts for every card."""

import json
from typing import Any

import pytest
from format_cards import SIMPLE_TEMPLATE, exact_card
from hypothesis import example, find, given, settings
from hypothesis import strategies as st

from trimtab_core.chunks import CHUNK_BYTES
from trimtab_extproc.formats import Kind, ParsedRequest, parse_request, rendering_for
from trimtab_extproc.formats.fields import OUTPUT_TOKENS_MAX, PROMPTS_MAX
from trimtab_extproc.formats.parsed_request import SEQUENCES_MAX

PARTS_TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.type }}{{ p.text }}{% endfor %}{% endif %}{{ m.tool_calls | tojson }}{% endfor %}"
)
CARDS = [
    None,
    exact_card(),
    exact_card(PARTS_TEMPLATE, content_format="openai", tools_content_format="openai"),
    exact_card("{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + SIMPLE_TEMPLATE),
    exact_card(None, table=None),
    exact_card(exact=False, reason="kimi_k3"),
]
PATHS = [
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/inference/v1/generate",
    "/v1/embeddings",
    "/pooling",
    "/v1/responses",
    "/v1/messages",
    "/v1/score",
    "/rerank",
    "/tokenize",
]
FIELDS = st.sampled_from(
    """
    model messages prompt input instructions system tools tool_choice role content type text name id function arguments
    parameters input_schema tool_calls tool_call_id call_id output thinking reasoning effort summary image_url url
    source data status n best_of stream echo logprobs prompt_logprobs truncate_prompt_tokens suffix prompt_embeds
    cache_salt chat_template chat_template_kwargs documents reasoning_effort output_config tool definition
    previous_response_id kv_transfer_params prompt_token_ids token_ids sampling_params features add_generation_prompt
    continue_final_message add_special_tokens max_tokens task namespace uuid tool_name tool_use_id is_error
    """.split()  # noqa: SIM905 - a long list reads better so
)
TYPES = """
    text image_url input_text output_text refusal function function_call function_call_output message reasoning custom
    custom_tool_call custom_tool_call_output tool_use tool_result thinking redacted_thinking image tool_addition
    tool_removal tool_definition tool_reference namespace input_audio summary_text reasoning_text document
    """.split()  # noqa: SIM905
ROLES = ["user", "assistant", "system", "tool", "developer"]
ODD = [
    "",
    "\x00",
    "é",
    "e\u0301",
    "<|im_end|>",
    '{"a": 1}',
    '{"a": "\\ud800"}',
    "token_embed",
    "low",
    "disabled",
    "auto",
]
WORDS = st.sampled_from([*TYPES, *ROLES, *ODD, "in_progress", "x-anthropic-billing-header: 1\n2"])
NUMBERS = st.sampled_from([0, 1, 2, -1, 0.5, 2**31, 2**32, 2**64, 10**30, -(10**30), float("nan"), float("inf")])
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=20,
)


def check(parsed: ParsedRequest) -> None:
    assert 1 <= parsed.sequences <= SEQUENCES_MAX
    assert parsed.max_tokens is None or 0 <= parsed.max_tokens <= OUTPUT_TOKENS_MAX
    assert len(parsed.sources) <= PROMPTS_MAX
    assert (parsed.reason is None) or (parsed.kind is Kind.OTHER and not parsed.sources)
    counts = set()
    for card in CARDS:
        rendering = rendering_for(parsed, card, "adapter", 5)
        counts.add(len(rendering.prompts))
        for prompt in rendering.prompts:
            assert len(prompt.chain) * CHUNK_BYTES <= prompt.size_bytes
            assert parsed.claims_prefix or len(prompt.chain) == 0
    assert counts == {len(parsed.sources)}


@given(path=st.sampled_from(PATHS), body=st.dictionaries(FIELDS, VALUES, max_size=8))
@settings(max_examples=200, deadline=None)
def test_any_json_object_is_read_without_an_error(path: str, body: dict[str, Any]) -> None:
    check(parse_request("POST", path, {"content-type": "application/json"}, json.dumps(body).encode()))


BLOCKS = st.lists(
    st.dictionaries(FIELDS, VALUES, max_size=5)
    | st.fixed_dictionaries(
        {"type": st.sampled_from(TYPES), "text": WORDS},
        optional={
            "input": st.dictionaries(FIELDS, VALUES, max_size=3),
            "content": VALUES,
            "thinking": WORDS,
            "tool": st.fixed_dictionaries({"type": WORDS, "name": WORDS}),
            "source": st.dictionaries(FIELDS, WORDS, max_size=3),
            "image_url": WORDS | st.dictionaries(FIELDS, WORDS, max_size=2),
        },
    ),
    max_size=4,
)
MESSAGES = st.lists(
    st.dictionaries(FIELDS, VALUES, max_size=5)
    | st.fixed_dictionaries(
        {"role": st.sampled_from(ROLES), "content": WORDS | BLOCKS},
        optional={"tool_calls": VALUES, "name": VALUES, "reasoning": VALUES, "type": st.just("message")},
    ),
    max_size=4,
)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": WORDS | BLOCKS}),
    min_size=1,
    max_size=4,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(TYPES), "role": st.sampled_from(ROLES)},
        optional={
            "content": WORDS | BLOCKS | VALUES,
            "name": WORDS,
            "arguments": WORDS | VALUES,
            "input": WORDS,
            "output": WORDS | BLOCKS,
            "call_id": WORDS,
            "summary": BLOCKS,
            "status": WORDS,
        },
    ),
    min_size=1,
    max_size=5,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "custom", "namespace", "web_search"]), "name": WORDS},
        optional={
            "parameters": VALUES,
            "input_schema": st.dictionaries(FIELDS, VALUES, max_size=3),
            "function": st.dictionaries(FIELDS, VALUES, max_size=3),
            "tools": st.lists(st.fixed_dictionaries({"type": WORDS, "name": WORDS}), max_size=2),
        },
    ),
    min_size=1,
    max_size=2,
)


@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]),
    messages=MESSAGES | TURNS | ITEMS,
    more=st.fixed_dictionaries(
        {}, optional={"system": WORDS | BLOCKS, "tools": TOOLS | st.lists(VALUES, max_size=3), "thinking": VALUES}
    ),
)
@settings(max_examples=300, deadline=None)
def test_any_conversation_is_read_without_an_error(path: str, messages: list[Any], more: dict[str, Any]) -> None:
    name = "input" if path == "/v1/responses" else "messages"
    body = json.dumps({"model": "m", "max_tokens": 1, name: messages, **more}).encode()
    check(parse_request("POST", path, {}, body))


@pytest.mark.parametrize(
    ("path", "name", "strategy"),
    [
        ("/v1/chat/completions", "messages", TURNS),
        ("/v1/responses", "input", ITEMS),
        ("/v1/messages", "messages", TURNS),
    ],
)
def test_the_fuzzer_makes_conversations_that_are_understood(path: str, name: str, strategy: Any) -> None:
    def is_understood(messages: list[Any]) -> bool:
        parsed = parse_request("POST", path, {}, json.dumps({name: messages}).encode())
        return parsed.kind is not Kind.OTHER and len(messages) > 1

    assert find(strategy, is_understood, settings=settings(max_examples=2000, deadline=None))


@given(
    method=st.sampled_from(["POST", "GET", ""]) | st.text(max_size=5),
    path=st.sampled_from(PATHS) | st.text(max_size=40),
    headers=st.dictionaries(st.sampled_from(["content-type", "content-encoding", "x"]), st.text(max_size=12)),
    body=st.binary(max_size=200),
)
@example(method="POST", path="/v1/completions", headers={}, body=b'{"prompt":"\xff"}')
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_without_an_error(method: str, path: str, headers: dict[str, str], body: bytes) -> None:
    check(parse_request(method, path, headers, body))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("depth", [50, 400, 900, 990, 1100, 100_000])
@pytest.mark.parametrize("field", ["messages", "input", "prompt", "tools", "system", "documents", "kv_transfer_params"])
def test_no_depth_of_nesting_is_an_error(path: str, depth: int, field: str) -> None:
    bombs = ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)
    for bomb in bombs:
        for value in (bomb, f'[{{"role":"user","content":"a","tool_calls":{bomb},"x":{bomb}}}]'):
            body = f'{{"model":"m","messages":[{{"role":"user","content":"a"}}],"{field}":{value}}}'
            check(parse_request("POST", path, {}, body.encode()))


@pytest.mark.parametrize("path", PATHS)
def test_a_cut_body_is_read_without_an_error(path: str) -> None:
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}]}
    ).encode()
    for end in range(len(body)):
        check(parse_request("POST", path, {}, body[:end]))
