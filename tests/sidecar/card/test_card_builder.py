"""A card is exact only when the engine's own answers say so; every other way ends in a reason.

The engine here is a small HTTP server with the real tokenizer of the tiny model and the tiny model's chat format
written out by hand, so that it can be made to differ in one thing at a time. `tests/core/rendering` has the real vLLM.
"""

import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tokenizers import Tokenizer, normalizers

from trimtab_core.chat_template import RenderClock
from trimtab_core.model_card import ModelCard
from trimtab_sidecar.card_builder import build_card, draft_card
from trimtab_sidecar.engine_flags import EngineFlags
from trimtab_sidecar.model_files import ModelFiles, read_model_files
from trimtab_sidecar.probes import EngineUnreachable

TINY = Path(__file__).parents[3] / "lab" / "trimtab_lab" / "data" / "tiny_model"
CLOCK = RenderClock(monotonic=time.monotonic, local_time=datetime.now)


@dataclass(slots=True)
class ToyEngine:
    """`/tokenize` of an engine that serves the tiny model."""

    tokenizer: Tokenizer
    bos: tuple[int, ...] = ()
    greeting: str = ""
    """Something that this engine's template has and the model's files do not."""
    refuses: Callable[[dict[str, Any]], bool] = lambda body: False
    status: int = 200

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.status != 200:
            return web.Response(status=self.status)
        if self.refuses(body):
            return web.json_response({"error": {}}, status=400)
        if "prompt" in body:
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
            ids = [*(self.bos if body["add_special_tokens"] else ()), *ids]
        else:
            ids = self.tokenizer.encode(self.render(body), add_special_tokens=False).ids
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 8192})

    def render(self, body: dict[str, Any]) -> str:
        text = self.greeting
        for message in body["messages"]:
            content = message.get("content") or ""
            if not isinstance(content, str):
                images = sum(part["type"] == "image_url" for part in content)
                content = "<|endoftext|>" * 5 * images + "\n".join(part.get("text", "") for part in content)
            role = "system" if message["role"] == "developer" else message["role"]
            text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
        if body.get("continue_final_message"):
            return text.removesuffix("<|im_end|>\n")
        return text + ("<|im_start|>assistant\n" if body.get("add_generation_prompt", True) else "")


@asynccontextmanager
async def serving(engine: ToyEngine) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/tokenize", engine.tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def build(engine: ToyEngine, *flags: str, model: Path | None = TINY) -> ModelCard:
    async with serving(engine) as url, aiohttp.ClientSession() as session:
        return await build_card(
            session=session,
            base_url=url,
            engine_args=flags,
            model_dir=model,
            served_model="tiny",
            block_tokens=32,
            env={},
            clock=CLOCK,
        )


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(Tokenizer.from_file(str(TINY / "tokenizer.json")))


async def test_an_engine_that_reads_every_probe_alike_makes_an_exact_card(engine: ToyEngine) -> None:
    card = await build(engine)
    assert (card.exact, card.reason) == (True, "")
    assert (card.normalizer, card.completion_prefix, card.block_tokens) == ("none", "", 32)
    assert 0.2 < card.tokens_per_byte < 0.6


async def test_what_the_engine_does_to_text_is_found_out_by_asking_it(engine: ToyEngine) -> None:
    engine.tokenizer.normalizer = normalizers.NFC()
    engine.bos = (0,)
    card = await build(engine)
    assert (card.exact, card.normalizer, card.completion_prefix) == (True, "nfc", "<|endoftext|>")


async def test_the_tokens_of_an_image_are_counted_where_a_model_takes_any(engine: ToyEngine, tmp_path: Path) -> None:
    assert (await build(engine)).image_tokens == 0
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    (model / "preprocessor_config.json").write_text("{}")
    assert 5 <= (await build(engine, model=model)).image_tokens <= 6
    engine.refuses = lambda body: "image_url" in json.dumps(body)
    assert (await build(engine, model=model)).image_tokens == 0


async def test_two_engines_alike_make_the_same_card(engine: ToyEngine) -> None:
    assert (await build(engine)).digest() == (await build(engine)).digest()


async def test_another_template_in_the_engine_is_noticed(engine: ToyEngine) -> None:
    engine.greeting = "Hi! "
    card = await build(engine)
    assert not card.exact
    assert card.reason == "probe 'user': the engine's text differs from byte 0 on"


async def test_a_normaliser_that_the_card_cannot_have_is_noticed(engine: ToyEngine) -> None:
    engine.tokenizer.normalizer = normalizers.Lowercase()
    card = await build(engine)
    assert not card.exact
    assert card.reason.startswith("probe 'user': the engine's text differs")


async def test_probes_that_the_engine_refuses_prove_nothing_either_way(engine: ToyEngine) -> None:
    engine.refuses = lambda body: "tools" in body or any(m["role"] == "system" for m in body.get("messages", ()))
    assert (await build(engine)).exact


async def test_an_engine_that_takes_no_chats_at_all_proves_nothing(engine: ToyEngine) -> None:
    engine.refuses = lambda body: "messages" in body
    card = await build(engine)
    assert (card.exact, card.reason) == (False, "the engine answered none of the probe chats")


async def test_a_chat_that_the_engine_takes_and_the_template_refuses_is_noticed(engine: ToyEngine) -> None:
    template = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + (TINY / "chat_template.jinja").read_text()
    card = await build(engine, "--chat-template", template)
    assert not card.exact
    assert card.reason.startswith("probe 'tools': the template refused the request")


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_an_engine_that_does_not_answer_is_asked_again_later(engine: ToyEngine, status: int) -> None:
    engine.status = status
    with pytest.raises(EngineUnreachable):
        await build(engine)


async def test_no_files_make_a_card_that_still_knows_tokens_per_byte(engine: ToyEngine, tmp_path: Path) -> None:
    for model, reason in ((tmp_path / "none", "no folder"), (tmp_path, "no tokenizer.json"), (None, "do not name")):
        card = await build(engine, model=model)
        assert not card.exact
        assert reason in card.reason
        assert card.tokens_per_byte == (await build(engine)).tokens_per_byte


@pytest.mark.parametrize("mode", ["mistral", "deepseek_v32", "deepseek_v4", "kimi_k3", "cohere", "inkling"])
async def test_tokenizer_modes_with_a_renderer_of_their_own_are_not_exact(engine: ToyEngine, mode: str) -> None:
    card = await build(engine, "--tokenizer-mode", mode)
    assert (card.exact, card.reason) == (False, f"tokenizer mode {mode} does not render through a template")


def draft(flags: EngineFlags | None = None, **files: Any) -> ModelCard:
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    return draft_card(ModelFiles(tokenizer=tokenizer, **files), flags or EngineFlags(), block_tokens=16)


def test_models_that_engines_render_on_their_own_are_not_exact() -> None:
    assert "Harmony" in draft(model_type="gpt_oss").reason
    assert "deepseek_v32" in draft(architectures=("DeepseekV32ForCausalLM",)).reason
    assert "mistral" in draft(mistral_format=True).reason
    assert "mistral" not in draft(EngineFlags(tokenizer_mode="hf"), mistral_format=True).reason


def test_requests_with_tools_prefer_the_template_for_tools() -> None:
    card = draft(templates={"default": "a", "tool_use": "b"})
    assert (card.template, card.tools_template) == ("a", "b")


def test_a_processors_template_is_for_requests_without_tools() -> None:
    card = draft(templates={"default": "a"}, processor_template="p", takes_media=True)
    assert (card.template, card.tools_template) == ("p", "a")


def test_a_template_of_the_flags_comes_before_all_others(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}")
    for given, text in ((str(path), path.read_text()), ("{{ inline }}", "{{ inline }}"), ("tool_use", "b")):
        flags = EngineFlags(chat_template=given)
        card = draft(flags, templates={"default": "a", "tool_use": "b"}, processor_template="p", takes_media=True)
        assert (card.template, card.tools_template) == (text, text)
    assert draft(EngineFlags(chat_template=str(path))).content_format == "openai"
    assert draft(EngineFlags(chat_template=str(path), content_format="string")).content_format == "string"


def test_a_template_that_is_not_to_be_read_here_leaves_the_card_without() -> None:
    card = draft(EngineFlags(chat_template="/engine/only.jinja"), templates={"default": "a"})
    assert (card.template, card.reason) == (None, "there is no chat template")


def test_a_template_with_a_token_that_strips_spaces_is_not_exact() -> None:
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 4096, "content": "<|user|>", "rstrip": True})
    for template, reason in (("<|user|>", "the added token <|user|> strips the spaces beside it"), ("<user>", "")):
        files = ModelFiles(tokenizer=tokenizer, templates={"default": template})
        assert draft_card(files, EngineFlags(), block_tokens=16).reason == reason


def test_a_tokenizer_that_is_not_invertible_gives_its_reason() -> None:
    card = draft_card(read_model_files(TINY), EngineFlags(), block_tokens=16)
    assert card.table is not None
    lossy = {"tokenizer": {"model": {"type": "WordPiece", "vocab": {}}}, "templates": {"default": "a"}}
    card = draft_card(ModelFiles(**lossy), EngineFlags(), block_tokens=16)
    assert (card.table, card.exact) == (None, False)
    assert "WordPiece" in card.reason
