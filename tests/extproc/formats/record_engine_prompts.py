"""Asks a running vLLM what it makes of the recorded cases, and writes its answers over the old ones.

    vllm serve TINY_MODEL --enable-scale-out --chat-template TEMPLATE ...    # TEMPLATE: the file's "template"
    python tests/extproc/formats/record_engine_prompts.py http://127.0.0.1:8000 TINY_MODEL/tokenizer.json FILE

The engine's render endpoints give token ids; the tokenizer's vocabulary gives their bytes. A case holds `texts` where
its prompts are text, and `ids` where the client or a prefill stage sent ids.
"""

import json
import sys
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 60


def byte_alphabet() -> dict[str, int]:
    """The letters in which byte-level vocabularies write bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(shifted)}


def render(url: str, case: dict[str, Any]) -> tuple[int, list[list[int]]]:
    """The engine's status and its token ids for a case, one list per prompt."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}{case['path']}/render", json.dumps(case["body"]).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, []
    return 200, [prompt["token_ids"] for prompt in (answer if isinstance(answer, list) else [answer])]


def main(url: str, tokenizer_file: str, cases_file: str) -> None:
    """Record every case of `cases_file` again."""
    with open(tokenizer_file, encoding="utf-8") as file:
        tokenizer = json.load(file)
    alphabet = byte_alphabet()
    pieces = {
        number: bytes(alphabet[letter] for letter in piece) for piece, number in tokenizer["model"]["vocab"].items()
    }
    pieces |= {token["id"]: token["content"].encode() for token in tokenizer["added_tokens"]}
    with open(cases_file, encoding="utf-8") as file:
        recorded = json.load(file)
    lines = []
    for case in recorded["cases"]:
        status, prompts = render(url, case)
        kind = "ids" if "ids" in case else "texts"
        kept = {name: case[name] for name in ("path", "name", "body")} | {"answer": status}
        if status == 200:
            kept[kind] = (
                prompts if kind == "ids" else [b"".join(map(pieces.__getitem__, ids)).decode() for ids in prompts]
            )
        lines.append(json.dumps(kept, ensure_ascii=False))
        print(status, case["path"], case["name"])
    head = json.dumps({"engine": recorded["engine"], "template": recorded["template"]}, ensure_ascii=False)
    with open(cases_file, "w", encoding="utf-8") as file:
        file.write(head[:-1] + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
