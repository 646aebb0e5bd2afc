"""A model's files as far as prompts depend on them: tokenizer, chat templates, special tokens, model type.

The one rule: only local files are read, a folder's or those of a hub id in the local cache that the engine filled; no
network, no code of the model's. A file that is missing or broken is left out: the card then says what is lacking.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_BYTES_MAX = 128 << 20
"""A larger file is not read."""


class ModelFilesMissing(Exception):  # noqa: N818 - tells what is the matter, not that something broke
    """There is no such folder, nor a copy in the local cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What the files say. Empty where there is no such file."""

    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """`tokenizer.json`."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """The tokenizer's chat templates by name; the one that is not named otherwise is `default`."""
    processor_template: str | None = None
    """A chat template of the processor of a model that takes media, if it is another than the tokenizer's."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    takes_media: bool = False
    """The model has a processor for images, sounds or videos."""
    mistral_format: bool = False
    """The folder is in Mistral's own format, which engines then prefer."""


def find_model(name: str, *, revision: str | None, download_dir: str | None, env: Mapping[str, str]) -> Path:
    """The folder of a model: `name` itself, or the snapshot of that hub id in the cache that `env` points to."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    cache = _hub_cache(download_dir, env)
    repository = cache / ("models--" + name.replace("/", "--"))
    wanted = revision or "main"
    try:
        commit = (repository / "refs" / wanted).read_text().strip()
    except OSError:
        commit = wanted
    snapshot = repository / "snapshots" / commit
    if ".." in name or ".." in wanted or not snapshot.is_dir():
        raise ModelFilesMissing(f"no folder and no copy in the local cache: {name}")
    return snapshot


def _hub_cache(download_dir: str | None, env: Mapping[str, str]) -> Path:
    if download_dir:
        return Path(download_dir)
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if path := env.get(variable):
            return Path(path)
    if home := env.get("HF_HOME"):
        return Path(home) / "hub"
    user_cache = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "/")) / ".cache")
    return Path(user_cache) / "huggingface" / "hub"


def read_model_files(model: Path, tokenizer: Path | None = None) -> ModelFiles:
    """The files of `model`, those of the tokenizer from `tokenizer` where that is another folder."""
    source = tokenizer or model
    config = _read_json(model / "config.json")
    tokenizer_config = _read_json(source / "tokenizer_config.json")
    processor_config = _read_json(source / "processor_config.json")
    architectures = config.get("architectures")
    return ModelFiles(
        tokenizer=_read_json(source / "tokenizer.json"),
        templates=_read_templates(source, tokenizer_config),
        processor_template=_read_processor_template(source, processor_config),
        special_tokens=_read_special_tokens(source, tokenizer_config),
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        model_type=str(config.get("model_type", "")),
        takes_media=bool(processor_config) or (source / "preprocessor_config.json").is_file(),
        mistral_format=any(model.glob("consolidated*.safetensors"))
        and ((source / "tekken.json").is_file() or any(source.glob("tokenizer.model.v*"))),
    )


def read_text(path: Path) -> str | None:
    """A text file, its line ends made `\\n` as engines read it; None where that fails."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(read_text(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own come before the entry in the tokenizer's configuration."""
    templates: dict[str, str] = {}
    if (default := read_text(folder / "chat_template.jinja")) is not None:
        templates["default"] = default
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        if (text := read_text(path)) is not None:
            templates[path.stem] = text
    return templates or _named_templates(tokenizer_config.get("chat_template"))


def _named_templates(entry: Any) -> dict[str, str]:
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, dict):
        return {str(name): text for name, text in entry.items() if isinstance(text, str)}
    if isinstance(entry, list):
        named = [item for item in entry if isinstance(item, dict) and isinstance(item.get("template"), str)]
        return {str(item.get("name")): item["template"] for item in named}
    return {}


def _read_processor_template(folder: Path, processor_config: Mapping[str, Any]) -> str | None:
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    template = legacy or processor_config.get("chat_template")
    return template if isinstance(template, str) else None


def _read_special_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; the configuration comes before the older file of their own."""
    tokens: dict[str, str] = {}
    extra = tokenizer_config.get("extra_special_tokens")
    for source in (
        _read_json(folder / "special_tokens_map.json"),
        extra if isinstance(extra, dict) else {},
        tokenizer_config,
    ):
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens
