"""The model card, made in a process of its own.

The one rule: what a large tokenizer costs is paid elsewhere. Reading one takes seconds without a pause and some
hundreds of megabytes for a moment; a short-lived child keeps both from the process that forwards events, and files
that break the reader break only the child. The request goes in by standard input, the card comes out by standard
output.
"""

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE
from datetime import datetime

import aiohttp
import msgspec

from trimtab_core.chat_template import RenderClock
from trimtab_core.errors import DataError
from trimtab_core.model_card import ModelCard
from trimtab_sidecar.card_builder import build_card
from trimtab_sidecar.probes import EngineUnreachable

CHILD_S = 180.0
"""A child that takes longer is stopped, and there is no card."""
ERROR_CHARS_MAX = 300
EXIT_UNREACHABLE = 3


class CardError(Exception):
    """The child broke, was stopped, or said nonsense. It may go better another time (memory was short)."""


class CardRequest(msgspec.Struct, frozen=True, kw_only=True, eq=True):
    """What `build_card` needs, but for the environment, which the child inherits."""

    base_url: str
    engine_args: tuple[str, ...]
    model_dir: str | None
    served_model: str | None
    block_tokens: int
    api_key: str | None = None


async def card_from_child(request: CardRequest) -> ModelCard:
    """The card. Raises EngineUnreachable, or CardError."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trimtab_sidecar.card_process", stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(CHILD_S):
            packed, complaint = await child.communicate(msgspec.msgpack.encode(request))
    except TimeoutError as error:
        raise CardError("making the card took too long") from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    last = (complaint.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:ERROR_CHARS_MAX]
    if child.returncode == EXIT_UNREACHABLE:
        raise EngineUnreachable(last)
    if child.returncode != 0:
        raise CardError(f"the card's maker ended with {child.returncode}: {last}")
    try:
        return ModelCard.decode(packed)
    except DataError as error:
        raise CardError(str(error)) from error


async def make_card(request: CardRequest) -> ModelCard:
    """What the child does."""
    headers = {"Authorization": f"Bearer {request.api_key}"} if request.api_key else {}
    async with aiohttp.ClientSession(headers=headers, trust_env=False) as session:
        return await build_card(
            session=session,
            base_url=request.base_url,
            engine_args=request.engine_args,
            model_dir=request.model_dir,
            served_model=request.served_model,
            block_tokens=request.block_tokens,
            env=os.environ,
            clock=RenderClock(monotonic=time.monotonic, local_time=datetime.now),
        )


def main() -> int:
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CardRequest)
    try:
        card = asyncio.run(make_card(request))
    except EngineUnreachable as error:
        print(error, file=sys.stderr)
        return EXIT_UNREACHABLE
    sys.stdout.buffer.write(card.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
