"""The store's client for the commands of every request: replies belong to their questions, whatever goes wrong."""

import asyncio

import pytest
from valkey_server import ValkeyProcess

from trimtab_state import StateUnavailable, Store, connect


@pytest.fixture
async def store(server: ValkeyProcess) -> Store:
    return connect(server.url)


async def test_replies_have_the_librarys_shapes(store: Store) -> None:
    assert await store.execute("SET", "{p}a", "1") is True
    assert await store.execute("SET", "{p}a", "2", "NX") is None
    assert await store.execute("GET", "{p}a") == b"1"
    assert await store.execute("SADD", "{p}s", "x", b"y") == 2
    assert await store.execute("SMEMBERS", "{p}s") == {b"x", b"y"}
    entry_id = await store.execute("XADD", "{p}l", "*", "b", b"\x00\xff")
    found = await store.execute("XREAD", "COUNT", 5, "STREAMS", "{p}l", "0")
    assert found == [[b"{p}l", [(entry_id, {b"b": b"\x00\xff"})]]]
    assert await store.execute("XREAD", "COUNT", 5, "STREAMS", "{p}l", "$") == []
    assert await store.batch([("PEXPIRE", "{p}a", 1000), ("PEXPIRE", "{p}none", 1000)]) == [True, False]
    await store.close()


async def test_a_transaction_is_done_as_a_whole_or_not_at_all(store: Store) -> None:
    assert await store.batch([("SET", "{p}a", "1"), ("INCR", "{p}a")], atomic=True) == [True, 2]
    with pytest.raises(StateUnavailable, match="unknown command"):
        await store.batch([("SET", "{p}a", "9"), ("NO-SUCH-COMMAND", "x")], atomic=True)
    assert await store.execute("GET", "{p}a") == b"2"
    await store.close()


async def test_a_refused_command_names_the_reason_and_leaves_the_connection_usable(store: Store) -> None:
    await store.execute("SET", "{p}a", "text")
    with pytest.raises(StateUnavailable, match="WRONGTYPE"):
        await store.batch([("GET", "{p}a"), ("SMEMBERS", "{p}a")])
    assert await store.batch([("GET", "{p}a"), ("SMEMBERS", "{p}a")], skips_other_types=True) == [b"text", None]
    await store.close()


async def test_a_question_that_is_given_up_never_answers_the_next_one(store: Store) -> None:
    waiting = asyncio.create_task(store.execute("BLPOP", "{p}list", 1))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await store.execute("RPUSH", "{p}list", "late")
    assert await store.execute("GET", "{p}none") is None
    assert await store.execute("LPOP", "{p}list") == b"late"
    await store.close()


async def test_a_store_that_does_not_answer_in_time_is_away(server: ValkeyProcess) -> None:
    store = connect(server.url).dedicated(0.2)
    with pytest.raises(StateUnavailable, match="Timeout"):
        await store.execute("BLPOP", "{p}list", 5)
    assert await store.execute("PING")
    await store.close()


async def test_questions_at_once_each_get_their_own_answer(store: Store) -> None:
    await store.batch([("SET", f"{{p}}{number}", str(number)) for number in range(100)])
    replies = await asyncio.gather(*(store.execute("GET", f"{{p}}{number}") for number in range(100)))
    assert replies == [str(number).encode() for number in range(100)]
    await store.close()


async def test_a_server_that_was_restarted_is_asked_again_over_a_new_connection(
    store: Store, server: ValkeyProcess
) -> None:
    assert await store.execute("PING")
    server.kill()
    with pytest.raises(StateUnavailable):
        await store.execute("PING")
    server.start()
    assert await store.execute("PING")
    await store.close()


async def test_a_connection_in_use_when_the_store_is_closed_ends_with_its_answer(
    store: Store, server: ValkeyProcess
) -> None:
    waiting = asyncio.create_task(store.execute("BLPOP", "{p}list", 5))
    while not server.says(b"blocked_clients:1\r", "INFO", "clients"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await store.close()
    server.command("RPUSH", "{p}list", "last")
    assert await waiting == (b"{p}list", b"last")
    await asyncio.to_thread(server.await_reply, b"connected_clients:1\r", "INFO", "clients")
