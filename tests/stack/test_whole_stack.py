"""What holds when all the real parts are put together, also while some of them are killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from stack_client import StackClient, until

from trimtab.probes import get_json
from trimtab_state import Policy

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stack]

WORDS = ("tide", "rudder", "keel", "harbour", "ballast", "compass", "sextant", "anchor", "halyard", "bosun", "galley")

BLOCK_TOKENS = 16
"""Of the emulated engines."""


def story(seed: int, *, words: int = 300) -> str:
    """Text of its own for each seed, some blocks long."""
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS, k=words))


async def test_a_conversation_stays_where_its_prefix_is_whichever_picker_is_asked(client: StackClient) -> None:
    for seed in range(3):
        turns = [story(seed)]
        first = await client.chat(*turns)
        assert first.status == 200
        for number in range(4):
            turns += [first.text, f"and then, for the {number}th time?"]
            await client.quiet()
            answer = await client.chat(*turns)
            assert answer.endpoint == first.endpoint
            assert answer.cached_tokens > 0.8 * first.prompt_tokens
    asked = [len((await get_json(f"{picker.url}/decisions?count=200"))["decisions"]) for picker in client.stack.pickers]
    assert min(asked) >= 5
    assert sum(asked) == 15


async def test_different_conversations_are_spread(client: StackClient) -> None:
    answers = await asyncio.gather(*(client.chat(story(seed)) for seed in range(100, 130)))
    served = Counter(answer.endpoint for answer in answers)
    assert len(served) == 3
    assert max(served.values()) <= 15


async def test_a_picker_predicts_exactly_what_the_engine_finds_in_its_cache(client: StackClient) -> None:
    prompt = story(200)
    await client.chat(prompt)
    await client.quiet()
    answer = await client.chat(prompt)
    decisions = [
        decision
        for picker in client.stack.pickers
        for decision in (await get_json(f"{picker.url}/decisions?count=1"))["decisions"]
    ]
    newest = min(decisions, key=lambda decision: decision["age_s"])
    won = next(row for row in newest["endpoints"] if row["endpoint"] == newest["endpoint"])
    assert newest["approximate"] is None
    # An engine computes the last token in any case, so a prompt of whole blocks is never found to its end.
    findable = (answer.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert min(won["hit_tokens"], findable) == answer.cached_tokens > 0


async def test_all_pickers_know_the_same_and_nothing_is_left_open(client: StackClient) -> None:
    await asyncio.gather(*(client.chat(story(seed), stream=seed % 2 == 0) for seed in range(300, 330)))
    states = await client.quiet()
    assert states[0]["index_chunks"] > 0
    assert states[0]["index_digest"] == states[1]["index_digest"]


async def test_a_client_that_leaves_ends_its_reservation(client: StackClient) -> None:
    task = asyncio.ensure_future(client.chat(story(400), max_tokens=2000, stream=True))

    async def is_open() -> bool:
        return any(state["open_reservations"] for state in await client.states())

    await until(is_open)
    task.cancel()
    await client.quiet()


async def test_a_killed_picker_costs_no_request_and_its_load_ends_with_it(client: StackClient) -> None:
    streams = [asyncio.ensure_future(client.chat(story(seed), max_tokens=300, stream=True)) for seed in range(500, 506)]

    async def all_open() -> bool:
        return sum(state["open_reservations"] for state in await client.states()) == len(streams)

    await until(all_open)
    client.stack.kill("picker-1")
    answers = await asyncio.gather(*streams, *(client.chat(story(seed)) for seed in range(510, 530)))
    assert [answer.status for answer in answers] == [200] * 26
    await client.stack.restart("picker-1")
    await client.quiet()


async def test_a_restarted_engine_is_known_to_be_empty(client: StackClient) -> None:
    answer = await client.chat(story(600))
    await client.quiet()
    assert min(await client.chunks(answer.endpoint)) > 0
    await client.stack.restart(f"engine-{client.engine_number(answer.endpoint)}")

    async def is_empty() -> bool:
        return await client.chunks(answer.endpoint) == [0, 0]

    await until(is_empty)
    await client.stack.settled()


async def test_a_restarted_sidecar_loses_nothing(client: StackClient) -> None:
    answer = await client.chat(story(700))
    await client.quiet()
    before = await client.chunks(answer.endpoint)
    assert min(before) > 0
    await client.stack.restart(f"sidecar-{client.engine_number(answer.endpoint)}")
    await client.stack.settled()
    await client.quiet()
    assert await client.chunks(answer.endpoint) == before
    again = await client.chat(story(700))
    assert again.endpoint == answer.endpoint
    assert again.cached_tokens > 0


async def test_without_the_store_routing_goes_on_and_afterwards_all_agree(client: StackClient) -> None:
    first = await client.chat(story(800))
    await client.quiet()
    client.stack.kill("valkey")
    for _ in range(6):
        answer = await client.chat(story(800))
        assert (answer.status, answer.endpoint) == (200, first.endpoint)
    await client.stack.restart("valkey")
    await client.stack.settled()
    states = await client.quiet()
    assert min(await client.chunks(first.endpoint)) > 0
    assert states[0]["members"] == 3


async def test_an_endpoint_that_the_operator_takes_away_gets_nothing_new(client: StackClient) -> None:
    stack = client.stack
    assert stack.control is not None
    await stack.control.put(stack.document(endpoints=stack.engines[:2]))

    async def two_members() -> bool:
        return [state["members"] for state in await client.states()] == [2, 2]

    await until(two_members)
    answers = await asyncio.gather(*(client.chat(story(seed)) for seed in range(900, 920)))
    assert {answer.endpoint for answer in answers} == {ports.address for ports in stack.engines[:2]}
    await stack.control.put(stack.document())
    await stack.settled()


async def test_the_policy_can_be_changed_while_running(client: StackClient) -> None:
    stack = client.stack
    assert stack.control is not None
    await stack.control.put(stack.document(policy=Policy(policy="round_robin")))

    async def is_round_robin() -> bool:
        return {state["policy"] for state in await client.states()} == {"round_robin"}

    await until(is_round_robin)
    served = {(await client.chat(story(1000))).endpoint for _ in range(12)}
    assert len(served) == 3
    await stack.control.put(stack.document())
