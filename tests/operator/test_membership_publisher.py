"""Members and policy as one control document in a real store."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from valkey_server import ValkeyProcess

from trimtab_operator.membership.control_publisher import ControlPublisher
from trimtab_operator.membership.endpoints import Members
from trimtab_state import ControlDocument, EndpointSpec, Policy, PoolKeys, Store, connect
from trimtab_state.documents import decode_control

KEYS = PoolKeys("n", "chat")


def members(*ips: str) -> Members:
    return Members(endpoints=tuple(EndpointSpec(name=f"{ip}:8000", address=f"{ip}:8000") for ip in ips))


@pytest.fixture
def server(tmp_path: Path) -> ValkeyProcess:
    return ValkeyProcess(tmp_path)


@pytest_asyncio.fixture
async def store(server: ValkeyProcess) -> AsyncIterator[Store]:
    server.start()
    client = connect(server.url)
    yield client
    await client.close()
    server.kill()


@pytest_asyncio.fixture
async def publisher(store: Store) -> AsyncIterator[ControlPublisher]:
    publisher = ControlPublisher(store, KEYS)
    task = asyncio.create_task(publisher.run())
    yield publisher
    assert not task.done(), task
    task.cancel()
    await asyncio.wait([task])


async def stored(store: Store) -> ControlDocument | None:
    data = await store.execute("GET", KEYS.control)
    return None if data is None else decode_control(data)


async def until_written(publisher: ControlPublisher, version: int) -> None:
    async with asyncio.timeout(30):
        while not (publisher.connected and publisher.version >= version):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_nothing_is_written_before_members_and_policy_are_known(
    publisher: ControlPublisher, store: Store
) -> None:
    publisher.set_policy(Policy())
    await asyncio.sleep(0.1)
    assert await stored(store) is None
    publisher.set_members(members("127.0.0.1"))
    await until_written(publisher, 1)
    document = await stored(store)
    assert document is not None
    assert [e.name for e in document.endpoints] == ["127.0.0.1:8000"]


async def test_the_newest_wins_and_what_is_the_same_is_not_written_again(
    publisher: ControlPublisher, store: Store
) -> None:
    publisher.set_policy(Policy())
    for n in range(100):
        publisher.set_members(members(f"127.0.0.{n}"))
    publisher.set_members(members("127.0.0.7"))
    await until_written(publisher, 1)
    for _ in range(3):
        publisher.set_members(members("127.0.0.7"))
        publisher.set_policy(Policy())
        await asyncio.sleep(0.05)
    document = await stored(store)
    assert document is not None
    assert (document.version, document.endpoints[0].name) == (1, "127.0.0.7:8000")
    publisher.set_policy(Policy(policy="round_robin", batch_limit=4))
    await until_written(publisher, 2)
    document = await stored(store)
    assert document is not None
    assert (document.policy.policy, document.policy.batch_limit) == ("round_robin", 4)


async def test_an_operator_that_comes_back_leaves_the_same_document_as_it_is(
    publisher: ControlPublisher, store: Store
) -> None:
    publisher.set_policy(Policy())
    publisher.set_members(members("127.0.0.1"))
    await until_written(publisher, 1)
    before = await store.execute("GET", KEYS.control)
    second = ControlPublisher(store, KEYS)
    assert await second.stored_policy() == Policy()
    task = asyncio.create_task(second.run())
    second.set_policy(Policy())
    second.set_members(members("127.0.0.1"))
    await until_written(second, 1)
    assert await store.execute("GET", KEYS.control) == before
    task.cancel()
    await asyncio.wait([task])


async def test_a_store_that_was_away_gets_the_newest_document_when_it_is_back_empty(
    publisher: ControlPublisher, store: Store, server: ValkeyProcess
) -> None:
    publisher.set_policy(Policy())
    publisher.set_members(members("127.0.0.1"))
    await until_written(publisher, 1)
    server.kill()
    publisher.set_members(members("127.0.0.2"))
    publisher.set_members(members("127.0.0.3"))
    await asyncio.sleep(0.7)
    assert not publisher.connected
    server.start()
    await until_written(publisher, 2)
    document = await stored(store)
    assert document is not None
    assert [e.name for e in document.endpoints] == ["127.0.0.3:8000"]
