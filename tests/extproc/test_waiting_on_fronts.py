"""Requests that wait for a place, over real connections, whichever gRPC server runs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from front_rig import FrontRig, GatewayStream
from gateway_messages import body, headers, response_headers
from waiting import until

from trimtab_state import Policy
from trimtab_state.request_class import Overflow

A = "10.0.0.1:8000"


@pytest.fixture
async def rig(each_front: str) -> AsyncIterator[FrontRig]:
    rig = FrontRig(each_front)
    rig.announce(A, policy=Policy(batch_limit=1, overflow=Overflow(wait_s=5.0)))
    async with rig.serving() as serving:
        yield serving


async def placed(stream: GatewayStream) -> None:
    """It has its endpoint, and keeps it."""
    await stream.send(headers(), body())
    for _ in range(2):
        assert await stream.read() is not None


async def until_waiting(rig: FrontRig, count: int) -> None:
    async def is_so() -> bool:
        return len(rig.picker.waiting) == count

    await until(is_so, f"{count} requests wait")


async def test_a_request_is_answered_when_the_one_before_it_has_ended(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        first, second = gateway.open(), gateway.open()
        await placed(first)
        await second.send(headers(), body())
        await until_waiting(rig, 1)
        assert rig.requests() == {A: 1}
        await first.talk(response_headers())
        await first.end()
        assert await second.read() is not None
        assert await second.read() is not None
        assert rig.requests() == {A: 1}
        await second.talk(response_headers())
        assert await second.end() is grpc.StatusCode.OK
    assert rig.count("trimtab_waits_total", outcome="placed") == 1


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        first, second = gateway.open(), gateway.open()
        await placed(first)
        await second.send(headers(), body())
        await until_waiting(rig, 1)
        second.call.cancel()
        await until_waiting(rig, 0)
        await first.talk(response_headers())
        await first.end()
    assert rig.count("trimtab_waits_total", outcome="left") == 1


async def test_in_vain_is_429_with_when_to_come_again(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        first, second = gateway.open(), gateway.open()
        await placed(first)
        await second.send(headers(), body())
        await until_waiting(rig, 1)
        rig.now_s += 5.0
        rig.picker.waiting.advance(rig.now_s)
        replies = [reply for _ in range(2) if (reply := await second.read()) is not None]
        refusal = next(reply.immediate_response for reply in replies if reply.immediate_response is not None)
        assert refusal.status is not None
        assert refusal.status.code == 429
        assert refusal.headers is not None
        names = {option.header.key for option in refusal.headers.set_headers if option.header is not None}
        assert "retry-after" in names
        await first.talk(response_headers())
        await first.end()


@pytest.mark.parametrize("ends_by", ["clients", "connection", "picker"])
async def test_when_all_end_at_once_nothing_is_left_and_nothing_fails(rig: FrontRig, ends_by: str) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    async with rig.gateway() as gateway:
        streams = [gateway.open() for _ in range(6)]
        await placed(streams[0])
        for number, stream in enumerate(streams[1:]):
            await stream.send(headers(), body())
            await until_waiting(rig, number + 1)
        if ends_by == "clients":
            for stream in streams:
                stream.call.cancel()
            await rig.until_in_flight(0)
        elif ends_by == "connection":
            await gateway.channel.close()
            await rig.until_in_flight(0)
        else:
            await rig.front.stop(0)
        await until_waiting(rig, 0)
        await asyncio.sleep(0)
        rig.picker.waiting.advance(rig.now_s + 60.0)
        rig.assert_idle()
    assert not faults
    assert rig.count("trimtab_waits_total") == 5
