"""A real vLLM on the CPU, started for a test and stopped after it. `TRIMTAB_VLLM` is its command's path."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TINY_MODEL = Path(__file__).parents[1] / "lab" / "trimtab_lab" / "data" / "tiny_model"
START_S = 240.0
"""Longest wait until it answers."""
_SERVE = ("--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "512", "--enable-scale-out")


class VllmProcess:
    """One engine that serves the model as `tiny`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port

    def _request(self, method: str, path: str, text: bytes | None = None) -> tuple[int, Any]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)) as connection:
            connection.request(method, path, text, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        return self._request("POST", path, json.dumps({"model": "tiny", **body}).encode())

    def chat_tokens(self, body: Mapping[str, Any]) -> list[int] | None:
        """The prompt of a chat completion, as the engine would compute it; None: refused.

        The server has no tool parser; it renders tools all the same if the choice is `none`.
        """
        has_tools = "tools" in body or "tools" in (body.get("chat_template_kwargs") or {})
        choice = {"tool_choice": "none"} if has_tools and "tool_choice" not in body else {}
        status, answer = self.post("/v1/chat/completions/render", {**body, **choice})
        return answer["token_ids"] if status == 200 else None

    def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        status, answer = self.post("/tokenize", body)
        return answer["tokens"] if status == 200 else None

    def version(self) -> str:
        return str(self._request("GET", "/version")[1]["version"])


@contextlib.contextmanager
def running_vllm(model: Path, *flags: str, weights: bool = True, port: int | None = None) -> Iterator[VllmProcess]:
    """An engine on this loopback port, or a free one; of two equal flags the last counts.

    Without weights: vLLM's own rendering server, which has no model in it.
    """
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
    kind = ["serve", str(model), *_SERVE] if weights else ["launch", "render", str(model)]
    common = ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["nice", "-n", "5", os.environ["TRIMTAB_VLLM"], *kind, *common, *flags],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _await_health(process, port, log)
            yield VllmProcess(port)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _await_health(process: subprocess.Popen[bytes], port: int, log: Any) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.25)
        finally:
            connection.close()
    log.seek(0)
    raise RuntimeError("vLLM did not start:\n" + log.read().decode(errors="replace")[-4000:])


def model_copy(folder: Path, **configuration: Any) -> Path:
    """A copy of the tiny model in `folder` whose tokenizer's configuration has these entries."""
    copied = Path(shutil.copytree(TINY_MODEL, folder / "model"))
    path = copied / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **configuration}))
    return copied
