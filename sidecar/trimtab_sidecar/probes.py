"""Probes: chats and prompts that the engine's own `/tokenize` must read just as a model card does.

The one rule: a card is exact only if every probe that the engine answers gives the card's bytes; one difference, or no
answer at all, and it is not, with a reason that names the probe. A probe that the engine refuses proves nothing either
way: templates may refuse system messages or tools. Probes are small and carry no user's text.

A first round, before there is a card to prove, finds what no file shows for certain: what the engine puts in front of a
prompt that is given as text, and whether its tokenizer normalises.
"""

import base64
import json
import struct
import unicodedata
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from trimtab_core.chat_template import RenderClock
from trimtab_core.model_card import ModelCard, Normalizer
from trimtab_core.not_renderable import NotRenderable
from trimtab_core.rendering import render_completion, render_prompt

PROBE_TIMEOUT_S = 30.0
"""Longest wait for one answer; past it the engine counts as unreachable."""
ANSWER_BYTES_MAX = 4 << 20
"""A longer answer is not read."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather & more: "now" <or> later',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Zürich, 東京"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 2}'},
}
_SYSTEM = {"role": "system", "content": "You are a careful assistant."}
_USER = {"role": "user", "content": "How are you?"}
_ANSWER = {"role": "assistant", "content": "Well, thank you."}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "clear", "temperature": 21.5}'}

CHAT_PROBES: Mapping[str, Mapping[str, Any]] = {
    "user": {"messages": [_USER]},
    "system": {"messages": [_SYSTEM, _USER]},
    "turns": {"messages": [_SYSTEM, _USER, _ANSWER, {"role": "user", "content": "And now?"}]},
    "no generation prompt": {"messages": [_USER, _ANSWER], "add_generation_prompt": False},
    "whitespace": {
        "messages": [{"role": "user", "content": "  \n\ttwo  spaces\r\n\n\nthree lines \t "}, _ANSWER, _USER]
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "First."}, {"type": "text", "text": " Second. "}]}
        ]
    },
    "scripts": {
        "messages": [{"role": "user", "content": "naïve façade, 東京, Ελλάδα, नमस्ते, 👩‍🚀, e\u0301 A\u030a \ufb01"}]
    },
    "tools": {"messages": [_SYSTEM, _USER], "tools": [_TOOL]},
    "tools without system": {"messages": [_USER], "tools": [_TOOL]},
    "tool call and result": {
        "messages": [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}, _RESULT],
        "tools": [_TOOL],
    },
    "tool call with text": {
        "messages": [
            _USER,
            {"role": "assistant", "content": "Let me look.", "tool_calls": [_CALL]},
            _RESULT,
            _ANSWER,
            _USER,
        ],
        "tools": [_TOOL],
    },
    "reasoning": {"messages": [_USER, {**_ANSWER, "reasoning": "They greet me."}, _USER]},
    "thinking in text": {
        "messages": [_USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nWell."}, _USER]
    },
    "thinking on": {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": True}},
    "thinking off": {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False}},
    "continued": {
        "messages": [_USER, {"role": "assistant", "content": "Well, I"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, _USER]},
}

_PROSE = (
    "The harbour lay still when the first boats went out. Nobody spoke; the engines did it for them, one after "
    "another, until the whole bay hummed. By noon (it was 12:05, to be exact) 37 of them had come back with 1,204 kg "
    "of herring. "
)
_CODE = (
    'def mean(values: list[float]) -> float:\n    """The arithmetic mean."""\n    return sum(values) / len(values)\n'
)
IMAGE_SIDE_PX = 512
"""Width and height of the image whose tokens are counted."""
SAMPLE = (_PROSE * 2 + _CODE) * 4
"""Ordinary text, English and code, from which a card's tokens per byte are measured."""


class EngineUnreachable(Exception):  # noqa: N818 - says what is the matter
    """The engine does not answer, or its answers are not those of `/tokenize`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the engine shows about itself before there is a card to prove."""

    completion_prefix: tuple[int, ...]
    """Token ids in front of a prompt that is given as text."""
    normalizer: Normalizer
    tokens_per_byte: float


class Tokenize:
    """One engine's `/tokenize`, for one served model."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str | None) -> None:
        self._session = session
        self._url = base_url.rstrip("/") + "/tokenize"
        self._model = {} if model is None else {"model": model}

    async def __call__(self, body: Mapping[str, Any]) -> list[int] | None:
        """The token ids of a prompt or chat; None where the engine refuses it. Raises `EngineUnreachable`."""
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with self._session.post(self._url, json={**self._model, **body}, timeout=timeout) as response:
                if response.status in (400, 422):
                    return None
                if response.status != 200:
                    raise EngineUnreachable(f"/tokenize answers {response.status}")
                answer = json.loads(await response.content.read(ANSWER_BYTES_MAX))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineUnreachable(f"/tokenize: {type(error).__name__}") from None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise EngineUnreachable("/tokenize answers without token ids")
        return tokens


async def explore(tokenize: Tokenize, card: ModelCard) -> Findings:
    """What the engine does to a plain prompt; `card` gives the bytes of tokens. Raises `EngineUnreachable`."""
    bare = await tokenize({"prompt": SAMPLE, "add_special_tokens": False})
    full = await tokenize({"prompt": SAMPLE, "add_special_tokens": True})
    if not bare or not full:
        raise EngineUnreachable("/tokenize refuses plain prompts")
    decomposed = await tokenize({"prompt": "e\u0301 A\u030a", "add_special_tokens": False})
    prefix = _prefix(bare, full)
    return Findings(
        completion_prefix=prefix,
        normalizer=_normalizer(card, decomposed or []),
        tokens_per_byte=round(len(bare) / len(SAMPLE.encode()), 4),
    )


def _prefix(bare: list[int], full: list[int]) -> tuple[int, ...]:
    for length in range(len(full) - len(bare) + 1):
        if full[length : length + len(bare)] == bare:
            return tuple(full[:length])
    raise EngineUnreachable("special tokens change how the engine reads a prompt")


def _normalizer(card: ModelCard, tokens: list[int]) -> Normalizer:
    try:
        composed = card.text_of_tokens(tokens) == unicodedata.normalize("NFC", "e\u0301 A\u030a").encode()
    except NotRenderable:
        return card.normalizer
    return "nfc" if composed else "none"


async def count_image_tokens(tokenize: Tokenize) -> int:
    """Tokens that one image adds to a chat; 0 where the engine takes none. Raises `EngineUnreachable`."""
    url = "data:image/png;base64," + base64.b64encode(_grey_png(IMAGE_SIDE_PX)).decode()
    text = {"type": "text", "text": "What is this?"}
    image = {"type": "image_url", "image_url": {"url": url}}
    without = await tokenize({"messages": [{"role": "user", "content": [text]}]})
    with_image = await tokenize({"messages": [{"role": "user", "content": [text, image]}]})
    return max(0, len(with_image) - len(without)) if with_image and without else 0


def _grey_png(side_px: int) -> bytes:
    def block(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side_px, side_px, 8, 0, 0, 0, 0)
    rows = (b"\0" + b"\x80" * side_px) * side_px
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(rows)) + block(b"IEND", b"")


async def disprove(tokenize: Tokenize, card: ModelCard, clock: RenderClock) -> str:
    """Looks for a probe that `card` reads otherwise than the engine: why the card is not exact, or an empty string.

    Raises `EngineUnreachable`.
    """
    proven = 0
    for name, body in CHAT_PROBES.items():
        tokens = await tokenize(body)
        if tokens is None:
            continue
        try:
            ours = card.normalize(render_prompt(card, body, clock=clock).text)
        except NotRenderable as refusal:
            return f"probe '{name}': {refusal.reason}, but the engine takes it"
        if difference := _difference(card, tokens, ours):
            return f"probe '{name}': {difference}"
        proven += 1
    for prompt in (SAMPLE, "  <b>\u2581 e\u0301", "東京\n\n\t👩‍🚀"):
        for special in (True, False):
            tokens = await tokenize({"prompt": prompt, "add_special_tokens": special})
            ours = card.normalize(render_completion(card, prompt, add_special_tokens=special))
            if tokens is None:
                return "the engine refuses a plain prompt"
            if difference := _difference(card, tokens, ours):
                return f"a plain prompt {'with' if special else 'without'} special tokens: {difference}"
    return "" if proven else "the engine answered none of the probe chats"


def _difference(card: ModelCard, tokens: list[int], ours: bytes) -> str:
    try:
        theirs = card.text_of_tokens(tokens)
    except NotRenderable as refusal:
        return refusal.reason
    if theirs == ours:
        return ""
    same = next(
        (at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours))
    )
    return f"the engine's text differs from byte {same} on"
