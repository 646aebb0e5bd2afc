"""The recorded answers of a real vLLM: for each chat template, what it made of each case of `cases.json`.

`tests/core/rendering/test_prompts_against_vllm.py` records them; every other test only reads. An answer is the text of
the prompt's tokens, or None where the engine refused the request.
"""

import dataclasses
import gzip
import json
import time
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from trimtab_core.chat_template import RenderClock
from trimtab_core.content_format import content_format_of
from trimtab_core.model_card import ModelCard

DATA = Path(__file__).parents[2] / "data" / "rendering"
TEMPLATES = sorted(path.stem for path in (DATA / "templates").glob("*.jinja"))
SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
NOT_RENDERED_ON_PURPOSE = frozenset({"kwargs tokenize"})
"""Cases that an engine takes and we leave alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One template's answers."""

    engine: str
    recorded_at: datetime
    """The engine's wall clock, for templates that print the date."""
    answers: dict[str, str | None]

    def clock(self) -> RenderClock:
        return RenderClock(monotonic=time.monotonic, local_time=lambda: self.recorded_at)


@cache
def cases() -> dict[str, dict[str, Any]]:
    return json.loads((DATA / "cases.json").read_text())


def template_source(name: str) -> str:
    return (DATA / "templates" / f"{name}.jinja").read_text()


def card_for(source: str, **changes: Any) -> ModelCard:
    """A card of the engine that the answers come from, with this template."""
    form = content_format_of(source)
    card = ModelCard(
        template=source,
        tools_template=source,
        content_format=form,
        tools_content_format=form,
        special_tokens=SPECIAL_TOKENS,
        normalizer="nfc",
        added_tokens=("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    )
    return dataclasses.replace(card, **changes)


def read_golden(name: str) -> Golden:
    with gzip.open(DATA / "golden" / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        stored = json.load(file)
    return Golden(
        engine=stored["engine"],
        recorded_at=datetime.fromisoformat(stored["recorded_at"]),
        answers=stored["answers"],
    )


def write_golden(name: str, golden: Golden) -> None:
    stored = {"engine": golden.engine, "recorded_at": golden.recorded_at.isoformat(), "answers": golden.answers}
    path = DATA / "golden" / f"{name}.json.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(stored, ensure_ascii=False, indent=1).encode(), mtime=0))
