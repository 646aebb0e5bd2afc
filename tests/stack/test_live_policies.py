"""A pool's policy, changed while requests run: what it does through a real Envoy, without a restart of anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from stack_client import StackClient, until

from trimtab.explain import as_table
from trimtab.probes import get_json
from trimtab.stack import StackSettings, running
from trimtab_state import Policy
from trimtab_state.request_class import ExpertShare, Overflow, RequestClass

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

OBJECTIVE = "x-gateway-inference-objective"
TEAM = "x-team"
WAIT_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StackClient]:
    settings = StackSettings(
        endpoints=2,
        pickers=2,
        engine_flags=("--expert-costs", "3=2.0"),
        wait_s=WAIT_S,
        shown_headers=(OBJECTIVE, TEAM),
    )
    log_dir: Path = tmp_path_factory.mktemp("stack") / "logs"
    async with running(settings, log_dir=log_dir) as stack, aiohttp.ClientSession() as session:
        yield StackClient(stack=stack, session=session)


async def put(client: StackClient, policy: Policy) -> None:
    """Change the policy, and wait until every picker has it."""
    assert client.stack.control is not None
    version = await client.stack.control.put(client.stack.document(policy=policy))

    async def is_known() -> bool:
        return all(state.get("control_version") == version for state in await client.states())

    await until(is_known)


async def ask(client: StackClient, text: str, *, max_tokens: int = 4, **headers: str) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    url = f"{client.stack.url}/v1/chat/completions"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.session.post(url, json=body, headers=named) as response:
        await response.read()
        return response.status, {name.lower(): value for name, value in response.headers.items()}


async def decisions(client: StackClient) -> list[dict[str, Any]]:
    """Of both pickers, the newest first."""
    found = []
    for picker in client.stack.pickers:
        page = await get_json(f"{picker.url}/decisions?count=50")
        assert page is not None
        found += page["decisions"]
    return sorted(found, key=lambda decision: float(decision["age_s"]))


async def test_more_requests_than_fit_wait_for_their_turn_and_all_are_answered(client: StackClient) -> None:
    await put(client, Policy(batch_limit=1, overflow=Overflow(wait_s=WAIT_S, tenant_header=TEAM)))
    asked = [ask(client, f"wait {n}", max_tokens=40, x_team=f"team {n % 2}") for n in range(8)]
    statuses = [status for status, _ in await asyncio.gather(*asked)]
    assert statuses == [200] * 8
    assert any(decision["waited_s"] for decision in await decisions(client))
    await client.quiet()


async def metric(client: StackClient, part: str) -> float:
    """The sum over the pickers of the series that have this in their name and labels."""
    total = 0.0
    for picker in client.stack.pickers:
        async with client.session.get(f"{picker.url}/metrics") as response:
            for text in (await response.text()).splitlines():
                name, _, value = text.rpartition(" ")
                if part in name:
                    total += float(value)
    return total


async def until_requests(client: StackClient, count: int) -> None:
    """Until every picker knows of so many."""

    async def is_so() -> bool:
        states = await client.states()
        return all(sum(row["requests"] for row in state["endpoints"]) == count for state in states)

    await until(is_so)


async def test_a_client_that_hangs_up_leaves_the_queue_at_once(client: StackClient) -> None:
    await put(client, Policy(batch_limit=1, overflow=Overflow(wait_s=WAIT_S)))
    left_before = await metric(client, 'outcome="left"')
    running = []
    for count in (1, 2):
        # One after the other: of what comes at two pickers in the same moment neither knows of the other's yet.
        running.append(asyncio.create_task(ask(client, f"long {count}", max_tokens=600)))
        await until_requests(client, count)
    waiting = asyncio.create_task(ask(client, "in vain"))

    async def waits() -> bool:
        return await metric(client, "trimtab_waiting_requests{") == 1

    await until(waits)
    waiting.cancel()

    async def has_left() -> bool:
        return await metric(client, 'outcome="left"') == left_before + 1

    await until(has_left)
    assert not all(task.done() for task in running)
    assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]
    await client.quiet()


async def test_without_a_wait_those_that_do_not_fit_are_told_when_to_come_again(client: StackClient) -> None:
    await put(client, Policy(batch_limit=1))
    answers = await asyncio.gather(*(ask(client, f"full {n}", max_tokens=60) for n in range(10)))
    refused = [headers for status, headers in answers if status == 429]
    assert {status for status, _ in answers} == {200, 429}
    assert all(headers["retry-after"] == "1" for headers in refused)
    await client.quiet()


async def test_every_picker_counts_the_weight_of_a_class(client: StackClient) -> None:
    gold = RequestClass(name="gold", weight_milli=4_000, objectives=("chat-gold",))
    await put(client, Policy(classes=(gold,)))
    asked = asyncio.create_task(ask(client, "heavy", max_tokens=400, **{OBJECTIVE: "chat-gold"}))

    async def both_count_it() -> bool:
        states = await client.states()
        return all(sum(row["weight"] for row in state["endpoints"]) == 4 for state in states)

    await until(both_count_it)
    assert (await asked)[0] == 200
    assert (await decisions(client))[0]["class"] == "gold"
    states = await client.quiet()
    assert not any(row["weight"] for state in states for row in state["endpoints"])


async def test_what_sidecars_say_of_experts_is_in_the_decision_and_in_its_explanation(client: StackClient) -> None:
    maths = RequestClass(name="maths", models=("tiny",), experts=(ExpertShare(first=3, last=3, share=1),))
    await put(client, Policy(classes=(maths,), log_above_tokens=8))

    async def experts_are_known() -> bool:
        await ask(client, "one and one is two " * 20)
        newest = (await decisions(client))[0]
        return all(row["terms"].get("expert_factor") == 2.0 for row in newest["endpoints"])

    await until(experts_are_known)
    newest = (await decisions(client))[0]
    row = newest["endpoints"][0]
    assert row["terms"]["p_before_log_tokens"] > row["p_tokens"]
    text = as_table(newest)
    assert "class maths" in text
    assert "experts x 2.00" in text
    assert "P before its logarithm" in text


async def test_the_way_to_the_endpoints_is_measured_once_it_is_asked_for(client: StackClient) -> None:
    await put(client, Policy(network="measured"))

    async def is_measured() -> bool:
        await ask(client, "how far")
        newest = (await decisions(client))[0]
        return all(row["terms"].get("network_tokens", 0) > 0 for row in newest["endpoints"])

    await until(is_measured)
    await put(client, Policy())
    await ask(client, "no more")
    assert not any(row["terms"] for row in (await decisions(client))[0]["endpoints"])
