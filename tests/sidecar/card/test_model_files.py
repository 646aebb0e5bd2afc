"""A model's files are found in a folder or in the local hub cache, and read in the engine's order of preference."""

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab_sidecar.model_files import ModelFilesMissing, find_model, read_model_files


def put(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def snapshot(cache: Path) -> Path:
    repository = cache / "models--org--name"
    put(repository, refs__main="abc123\n", snapshots__abc123__config_dot_json={"model_type": "qwen3"})
    return repository / "snapshots" / "abc123"


def find(name: str, revision: str | None = None, download_dir: str | None = None, **env: str) -> Path:
    return find_model(name, revision=revision, download_dir=download_dir, env=env)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert find(str(tmp_path)) == tmp_path


def test_a_hub_id_is_looked_up_where_the_engine_keeps_its_cache(tmp_path: Path) -> None:
    for cache, env in (
        (tmp_path / "a", {"HF_HUB_CACHE": str(tmp_path / "a"), "HF_HOME": "/nowhere"}),
        (tmp_path / "b" / "hub", {"HF_HOME": str(tmp_path / "b")}),
        (tmp_path / "c" / "huggingface" / "hub", {"XDG_CACHE_HOME": str(tmp_path / "c")}),
        (tmp_path / "d" / ".cache" / "huggingface" / "hub", {"HOME": str(tmp_path / "d")}),
    ):
        folder = snapshot(cache)
        assert find("org/name", **env) == folder
    assert find("org/name", download_dir=str(tmp_path / "a"), HF_HOME="/nowhere") == snapshot(tmp_path / "a")


def test_a_revision_is_a_branch_or_a_commit(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    assert find("org/name", "main", HF_HUB_CACHE=str(tmp_path)) == folder
    assert find("org/name", "abc123", HF_HUB_CACHE=str(tmp_path)) == folder


@pytest.mark.parametrize(("name", "revision"), [("org/other", None), ("org/name", "v2"), ("org/name", "../abc123")])
def test_what_is_not_there_is_missing(tmp_path: Path, name: str, revision: str | None) -> None:
    snapshot(tmp_path)
    with pytest.raises(ModelFilesMissing):
        find(name, revision, HF_HUB_CACHE=str(tmp_path))


def test_an_empty_folder_has_nothing_and_is_no_error(tmp_path: Path) -> None:
    files = read_model_files(tmp_path)
    assert (files.tokenizer, files.templates, files.special_tokens, files.model_type) == ({}, {}, {}, "")


def test_broken_files_count_as_absent(tmp_path: Path) -> None:
    put(tmp_path, config_dot_json="{", tokenizer_dot_json="[1]", tokenizer_config_dot_json="nul")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert read_model_files(tmp_path).templates == {}


def test_template_files_come_before_the_tokenizers_configuration(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_config_dot_json={"chat_template": "from config"})
    assert read_model_files(tmp_path).templates == {"default": "from config"}
    put(tmp_path, chat_template_dot_jinja="from file\r\n", additional_chat_templates__tool_use_dot_jinja="with tools")
    assert read_model_files(tmp_path).templates == {"default": "from file\n", "tool_use": "with tools"}


def test_a_configuration_can_name_several_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    put(tmp_path, tokenizer_config_dot_json={"chat_template": named})
    assert read_model_files(tmp_path).templates == {"default": "a", "tool_use": "b"}
    put(tmp_path, tokenizer_config_dot_json={"chat_template": {"default": "c"}})
    assert read_model_files(tmp_path).templates == {"default": "c"}


def test_a_processors_template_is_known_apart(tmp_path: Path) -> None:
    put(tmp_path, chat_template_dot_json={"chat_template": "with images"}, preprocessor_config_dot_json={})
    files = read_model_files(tmp_path)
    assert (files.processor_template, files.templates, files.takes_media) == ("with images", {}, True)


def test_special_tokens_are_text_whatever_form_they_have(tmp_path: Path) -> None:
    put(
        tmp_path,
        special_tokens_map_dot_json={"bos_token": "<old>", "cls_token": {"content": "<cls>"}},
        tokenizer_config_dot_json={
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "pad_token": None,
            "add_bos_token": True,
            "extra_special_tokens": {"image_token": "<img>"},
        },
    )
    assert read_model_files(tmp_path).special_tokens == {
        "bos_token": "<s>",
        "cls_token": "<cls>",
        "eos_token": "</s>",
        "image_token": "<img>",
    }


def test_a_tokenizer_can_come_from_another_folder(tmp_path: Path) -> None:
    model = put(tmp_path / "m", config_dot_json={"model_type": "llama"}, chat_template_dot_jinja="model's")
    tokenizer = put(tmp_path / "t", chat_template_dot_jinja="tokenizer's", tokenizer_dot_json={"model": {}})
    files = read_model_files(model, tokenizer)
    assert (files.model_type, files.templates) == ("llama", {"default": "tokenizer's"})
