"""`trimtab local`: the whole stack on this machine, until Ctrl-C.

Its one rule: what it prints works as printed. It must not send requests of its own.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from trimtab.commands import MODEL_NAME
from trimtab.engine_choice import EngineChoice
from trimtab.stack import Stack, StackSettings, running


async def local(choice: EngineChoice, *, say: Callable[[str], None]) -> None:
    """Start, say how to use it, and wait until cancelled.

    Raises UsageError before anything is started, ProcessError if a part fails, then or later.
    """
    settings = StackSettings(
        endpoints=choice.endpoint_count,
        vllm=choice.vllm_command(),
        engine_flags=choice.vllm_flags() if choice.is_real else (),
        well_known_ports=True,
    )
    kind = "real vLLM" if choice.is_real else "emulated"
    say(f"Starting {settings.endpoints} {kind} engines with sidecars, {settings.pickers} pickers, Valkey and Envoy ...")
    async with running(settings) as stack:
        say(usage(stack))
        await stack.supervisor.guard(asyncio.Event().wait())


def usage(stack: Stack) -> str:
    """How to talk to the stack and look into it. Commands start at the left edge, so that they can be pasted whole."""
    urls = " ".join(f"--url {picker.url}" for picker in stack.pickers)
    command = _command()
    return f"""\
Ready: {stack.url}

# With curl:
curl -s {stack.url}/v1/chat/completions -H 'content-type: application/json' \\
  -d '{{"model": "{MODEL_NAME}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 16}}'

# With the OpenAI client (pip install openai):
python3 - <<'END'
from openai import OpenAI
client = OpenAI(base_url="{stack.url}/v1", api_key="unused")
answer = client.chat.completions.create(
    model="{MODEL_NAME}", messages=[{{"role": "user", "content": "Hello"}}], max_tokens=16
)
print(answer.choices[0].message.content)
END

# Why the last requests went where they went (the endpoint is in the response header x-trimtab-endpoint, too):
{command} explain {urls}

# The endpoints as the pickers believe them now:
{command} top {urls} --watch

# Metrics of the pickers, and the logs of every process:
{" ".join(f"{picker.url}/metrics" for picker in stack.pickers)}
{stack.supervisor.log_dir}

Ctrl-C ends it all."""


def _command() -> str:
    """As it is called from here: of the environment that this runs in, whether it is activated or not."""
    python = Path(sys.executable)
    command = python.with_name("trimtab")
    if not command.exists():
        return f"{shlex.quote(str(python))} -m trimtab"
    here = Path.cwd()
    return shlex.quote(str(command.relative_to(here) if command.is_relative_to(here) else command))
