"""Makes the model card of one engine: from the model's files, the engine's flags, and the engine's own answers.

The one rule: the card says `exact` only after the probes; whatever stands in the way becomes its `reason`, and a card
with a reason is still a card. Only an engine that does not answer is an exception, since it may answer later.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from trimtab_core.chat_messages import ContentFormat
from trimtab_core.chat_template import RenderClock
from trimtab_core.content_format import content_format_of
from trimtab_core.model_card import ModelCard
from trimtab_core.not_renderable import NotRenderable
from trimtab_sidecar.engine_flags import EngineFlags, parse_engine_flags
from trimtab_sidecar.model_files import ModelFiles, ModelFilesMissing, find_model, read_model_files, read_text
from trimtab_sidecar.probes import Tokenize, count_image_tokens, disprove, explore
from trimtab_sidecar.token_pieces import NotInvertible, read_token_pieces

_JINJA_MODES = frozenset({"auto", "hf", "slow", "kimi_audio"})
"""Tokenizer modes whose chats go through the Jinja template; the others have renderers of their own."""
_OWN_RENDERERS = {
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
}
"""Architectures for which engines choose such a renderer unasked."""


async def build_card(
    *,
    session: aiohttp.ClientSession,
    base_url: str,
    engine_args: Sequence[str],
    model_dir: str | Path | None,
    served_model: str | None,
    block_tokens: int,
    env: Mapping[str, str],
    clock: RenderClock,
) -> ModelCard:
    """The card of the engine at `base_url`, proven by probes. Raises `EngineUnreachable` while it does not answer.

    `engine_args` is the engine container's command and args in one list; `model_dir` a folder that takes the place of
    the model that they name; `env` the engine's environment, for the place of its hub cache.
    """
    flags = parse_engine_flags(engine_args)
    try:
        files = _read_files(flags, model_dir, env)
        card = draft_card(files, flags, block_tokens=block_tokens)
    except ModelFilesMissing as missing:
        files = ModelFiles()
        card = ModelCard(block_tokens=block_tokens, reason=str(missing))
    tokenize = Tokenize(session, base_url, served_model)
    findings = await explore(tokenize, card)
    card = dataclasses.replace(
        card,
        normalizer=findings.normalizer,
        tokens_per_byte=findings.tokens_per_byte,
        image_tokens=await count_image_tokens(tokenize) if files.takes_media else 0,
    )
    if card.table is None:
        return card
    try:
        prefix = card.text_of_tokens(findings.completion_prefix).decode()
    except (NotRenderable, UnicodeDecodeError):
        return dataclasses.replace(card, reason="what the engine puts in front of a plain prompt has no text")
    card = dataclasses.replace(card, completion_prefix=prefix)
    reason = card.reason or await disprove(tokenize, card, clock)
    if reason and not card.reason and "strftime_now" in f"{card.template}{card.tools_template}":
        reason = await disprove(tokenize, card, clock)  # it may have struck midnight between two probes
    return dataclasses.replace(card, exact=not reason, reason=reason)


def draft_card(files: ModelFiles, flags: EngineFlags, *, block_tokens: int) -> ModelCard:
    """The card as files and flags tell it, not yet proven. An empty `reason`: nothing speaks against it so far."""
    template, tools_template = _choose_templates(files, flags)
    card = ModelCard(
        template=template,
        tools_template=tools_template,
        content_format=_content_format(template, flags),
        tools_content_format=_content_format(tools_template, flags),
        default_template_kwargs=flags.default_template_kwargs,
        exclude_tools_when_tool_choice_none=flags.exclude_tools_when_tool_choice_none,
        special_tokens=files.special_tokens,
        block_tokens=block_tokens,
        reason=_own_renderer(files, flags),
    )
    try:
        pieces = read_token_pieces(files.tokenizer)
    except NotInvertible as finding:
        return dataclasses.replace(card, reason=card.reason or finding.reason)
    reason = card.reason or _unreadable(f"{template or ''}{tools_template or ''}", pieces.stripping_tokens)
    return dataclasses.replace(
        card,
        table=pieces.table,
        normalizer=pieces.normalizer,
        space_marker=pieces.space_marker,
        added_tokens=pieces.added_tokens,
        reason=reason,
    )


def _unreadable(templates: str, stripping_tokens: Sequence[str]) -> str:
    if not templates:
        return "there is no chat template"
    for token in stripping_tokens:
        if token in templates:
            return f"the added token {token} strips the spaces beside it"
    return ""


def _read_files(flags: EngineFlags, model_dir: str | Path | None, env: Mapping[str, str]) -> ModelFiles:
    name = str(model_dir) if model_dir is not None else flags.model
    if name is None:
        raise ModelFilesMissing("the engine's arguments do not name a model")
    model = find_model(name, revision=flags.revision, download_dir=flags.download_dir, env=env)
    tokenizer = None
    if flags.tokenizer is not None and flags.tokenizer != flags.model:
        revision = flags.tokenizer_revision or flags.revision
        tokenizer = find_model(flags.tokenizer, revision=revision, download_dir=flags.download_dir, env=env)
    return read_model_files(model, tokenizer)


def _own_renderer(files: ModelFiles, flags: EngineFlags) -> str:
    if flags.tokenizer_mode not in _JINJA_MODES:
        return f"tokenizer mode {flags.tokenizer_mode} does not render through a template"
    if files.model_type == "gpt_oss":
        return "gpt_oss renders in the Harmony format"
    if flags.tokenizer_mode == "auto":
        for architecture in files.architectures:
            if architecture in _OWN_RENDERERS:
                return f"tokenizer mode {_OWN_RENDERERS[architecture]} does not render through a template"
        if files.mistral_format:
            return "tokenizer mode mistral does not render through a template"
    return ""


def _choose_templates(files: ModelFiles, flags: EngineFlags) -> tuple[str | None, str | None]:
    """The templates of requests without and with tools, in the engine's order of preference."""
    if flags.chat_template is not None:
        given = _given_template(flags.chat_template, files)
        return given, given
    default = files.templates.get("default")
    with_tools = files.templates.get("tool_use", default)
    if files.processor_template is not None and files.takes_media:
        return files.processor_template, with_tools
    return default, with_tools


def _given_template(value: str, files: ModelFiles) -> str | None:
    """`--chat-template` as a file, the text itself, or the name of one of the model's templates.

    A path that is not readable here (it may be the engine's own file system, or a template that comes with the engine)
    gives None: the card then has no template, and says so.
    """
    if len(files.templates) > 1 and value in files.templates:
        return files.templates[value]
    text = read_text(Path(value)) if len(value) < 4096 and "\0" not in value else None
    if text is not None:
        return text
    return value if any(letter in value for letter in "{}\n") else None


def _content_format(template: str | None, flags: EngineFlags) -> ContentFormat:
    if flags.content_format == "openai":
        return "openai"
    if flags.content_format == "string" or template is None:
        return "string"
    try:
        return content_format_of(template)
    except NotRenderable:
        return "string"
