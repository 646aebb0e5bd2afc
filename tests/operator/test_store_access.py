"""The pools' users in real stores: what they may do, and that they come back when a store forgets them."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from child_objects import install
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from valkey_server import ValkeyProcess, free_port, running, watched_by_a_sentinel

import trimtab_sidecar
import trimtab_state
from trimtab_operator.api.pool import PoolKey
from trimtab_operator.install import Install
from trimtab_operator.store.access import StoreAccessManager
from trimtab_operator.store.login import as_given, files_left_out, with_login
from trimtab_operator.store.pool_user import CONNECTION_COMMANDS, KEY_COMMANDS, user_name
from trimtab_state import ControlDocument, ControlWriter, PoolKeys, StateSettings, StateUnavailable, Store, connect
from trimtab_state.store_url import parse_store_url

KEY, OTHER = PoolKey("ns", "chat"), PoolKey("ns", "chat-2")
OWN_PREFIX = PoolKeys("ns", "chat").prefix


@pytest.fixture
def server() -> Iterator[ValkeyProcess]:
    with running(password="of-the-operator") as process:
        yield process


@asynccontextmanager
async def manager_of(url: str) -> AsyncIterator[tuple[StoreAccessManager, Store, Install]]:
    settings = install(store_url=url)
    store = connect(url)
    try:
        yield StoreAccessManager(store, settings), store, settings
    finally:
        await store.close()


@asynccontextmanager
async def logged_in(url: str) -> AsyncIterator[Store]:
    store = connect(url)
    try:
        yield store
    finally:
        await store.close()


async def refusal(store: Store, *command: str | int) -> str:
    """What the store says to a command that it must refuse."""
    with pytest.raises(StateUnavailable) as raised:
        await store.execute(*command)
    return str(raised.value)


async def test_a_pools_user_reaches_its_own_keys(server: ValkeyProcess) -> None:
    async with manager_of(server.url) as (manager, _, settings):
        access = await manager.ensure(KEY)
        assert access.is_own_user
        assert access.reason == ""
        assert access.secret == settings.pool_secret(KEY)
        assert "of-the-operator" not in access.url
        async with logged_in(access.url) as store:
            await store.batch([("SET", OWN_PREFIX + "x", "1", "PX", 60_000), ("GET", OWN_PREFIX + "x")], atomic=True)
            assert await store.execute("GET", OWN_PREFIX + "x") == b"1"


FORBIDDEN: list[tuple[str | int, ...]] = [
    ("GET", PoolKeys("ns", "chat-2").prefix + "control"),
    ("SET", PoolKeys("ns", "chat-2").prefix + "control", "x"),
    ("DEL", PoolKeys("other", "chat").prefix + "control"),
    ("XADD", PoolKeys("ns", "chat-2").prefix + "kv_log", "*", "b", "x"),
    ("XREAD", "STREAMS", OWN_PREFIX + "kv_log", PoolKeys("ns", "chat-2").prefix + "kv_log", "0", "0"),
    ("MGET", OWN_PREFIX + "control", "anything"),
    ("SMEMBERS", "trimtab:install:0:pools"),
    ("KEYS", "*"),
    ("SCAN", 0),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "me", "on", "nopass", "+@all", "~*"),
    ("EVAL", "return 1", 0),
    ("FUNCTION", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("PUBLISH", "channel", "x"),
    ("SUBSCRIBE", "channel"),
    ("INFO",),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("SHUTDOWN",),
    ("REPLICAOF", "NO", "ONE"),
    ("DUMP", OWN_PREFIX + "control"),
    ("COPY", OWN_PREFIX + "a", OWN_PREFIX + "b"),
    ("SAVE",),
    ("SLOWLOG", "GET"),
    ("MIGRATE", "127.0.0.1", 1, OWN_PREFIX + "a", 0, 1),
]


async def test_a_pools_user_is_refused_everything_else(server: ValkeyProcess) -> None:
    async with manager_of(server.url) as (manager, _, _):
        access = await manager.ensure(KEY)
        async with logged_in(access.url) as store:
            for command in FORBIDDEN:
                assert re.search("NOPERM|NoPermission", await refusal(store, *command)), command


def test_every_command_that_pickers_and_sidecars_send_is_in_the_list() -> None:
    folders = [Path(module.__file__ or "").parent for module in (trimtab_state, trimtab_sidecar)]
    found: set[str] = set()
    for path in [path for folder in folders for path in folder.glob("*.py") if path.name != "control_writer.py"]:
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"\(\s*\"([A-Z]{3,12})\",\s*[a-z*]", text))
    known = {command.upper() for command in KEY_COMMANDS}
    found -= {command.partition("|")[0].upper() for command in CONNECTION_COMMANDS}
    # The operator alone reads alarms, and with its own login; everybody may log in; the last is an argument.
    assert found - known - {"XRANGE", "PTTL", "AUTH", "BLOCK"} == set()
    assert known - found - {"XREAD"} == set(), "what nobody sends is not to be allowed"


async def test_no_log_of_the_server_has_the_password(server: ValkeyProcess) -> None:
    server.command("CONFIG", "SET", "slowlog-log-slower-than", "0")
    async with manager_of(server.url) as (manager, _, settings):
        await manager.ensure(KEY)
        assert settings.store_password(KEY).encode() not in server.command("SLOWLOG", "GET", "50")


async def test_a_pools_user_that_is_as_it_should_be_is_not_touched_again(server: ValkeyProcess) -> None:
    async with manager_of(server.url) as (manager, _, _):
        access = await manager.ensure(KEY)
        server.command("CONFIG", "RESETSTAT")
        assert await manager.ensure(KEY) == access
        assert await manager.look_after() == 0
        assert b"acl|setuser" not in server.command("INFO", "commandstats")


@pytest.mark.parametrize(
    "change", [("+@all",), ("~*",), ("off",), ("nopass",), (">another",), ("-get",), ("resetkeys",), ("&*",)]
)
async def test_a_pools_user_that_somebody_changed_is_put_right(server: ValkeyProcess, change: tuple[str, ...]) -> None:
    async with manager_of(server.url) as (manager, _, _):
        access = await manager.ensure(KEY)
        before = server.command("ACL", "LIST")
        server.command("ACL", "SETUSER", user_name(KEY), *change)
        assert server.command("ACL", "LIST") != before
        assert await manager.ensure(KEY) == access
        assert server.command("ACL", "LIST") == before


async def test_users_that_a_restarted_store_has_lost_come_back(server: ValkeyProcess) -> None:
    async with manager_of(server.url) as (manager, _, _):
        accesses = [await manager.ensure(key) for key in (KEY, OTHER)]
        server.restart_empty()
        async with logged_in(accesses[0].url) as store:
            assert "invalid username-password pair" in await refusal(store, "GET", OWN_PREFIX + "x")
            for _ in range(2):
                with contextlib.suppress(StateUnavailable):  # the connection that the restart has ended
                    await manager.look_after()
            assert await store.execute("GET", OWN_PREFIX + "x") is None
            assert await manager.look_after() == 0


async def test_a_pool_that_is_gone_is_logged_out_and_one_that_is_made_again_logs_in_as_before(
    server: ValkeyProcess,
) -> None:
    async with manager_of(server.url) as (manager, operator, _):
        access = await manager.ensure(KEY)
        async with logged_in(access.url) as sidecar:
            await sidecar.execute("SET", OWN_PREFIX + "x", "1")
            await manager.drop(KEY)
            await manager.drop(KEY)
            await refusal(sidecar, "GET", OWN_PREFIX + "x")
            assert user_name(KEY).encode() not in await operator.execute("ACL", "USERS")
            assert await manager.look_after() == 0
            assert (await manager.ensure(KEY)).url == access.url
            assert await sidecar.execute("GET", OWN_PREFIX + "x") == b"1"


async def test_another_operator_process_makes_the_same_user(server: ValkeyProcess) -> None:
    async with manager_of(server.url) as (first, _, _), manager_of(server.url) as (second, _, _):
        access = await first.ensure(KEY)
        before = server.command("ACL", "LIST")
        assert await second.ensure(KEY) == access
        assert server.command("ACL", "LIST") == before


async def test_while_the_store_is_away_the_last_answer_holds(server: ValkeyProcess) -> None:
    async with manager_of(server.url) as (manager, _, _):
        access = await manager.ensure(KEY)
        server.kill()
        with pytest.raises(StateUnavailable):
            await manager.ensure(KEY)
        assert manager.last(KEY, reason="away") == replace(access, reason="away")
        assert manager.last(OTHER, reason="away") is None
        assert manager.presumed(KEY, reason="away") == replace(access, reason="away")


@pytest.mark.parametrize("missing", ["-acl", "-acl|setuser", "-acl|getuser"])
async def test_a_store_that_refuses_users_gives_the_operators_own_login_and_the_reason(
    server: ValkeyProcess, missing: str
) -> None:
    server.command("ACL", "SETUSER", "limited", "on", ">p@ss word", "~trimtab:*", "+@all", missing)
    url = server.url.replace(":of-the-operator@", "limited:p%40ss%20word@")
    async with manager_of(url) as (manager, _, settings):
        access = await manager.ensure(KEY)
        assert not access.is_own_user
        assert parse_store_url(access.url) == parse_store_url(url)
        assert access.secret == settings.pool_secret(KEY)
        assert access.reason == ""
        (note,) = access.notes
        assert "refuses users" in note
        assert "acl" in note.lower()
        async with logged_in(access.url) as store:
            await store.execute("SET", OWN_PREFIX + "x", "1")
        # As soon as the store allows it, the pool has a user of its own.
        server.command("ACL", "SETUSER", "limited", "+acl")
        assert (await manager.ensure(KEY)).is_own_user


async def test_a_store_without_the_command_gives_the_operators_own_login() -> None:
    with running(config='rename-command ACL ""\n') as server:
        async with manager_of(server.url) as (manager, _, _):
            access = await manager.ensure(KEY)
            assert not access.is_own_user
            assert "unknown command" in access.notes[0]


@contextlib.contextmanager
def busy(server: ValkeyProcess) -> Iterator[None]:
    """A script of somebody's does not end, and the server says so to everybody."""
    server.command("CONFIG", "SET", "lua-time-limit", "1")
    login = b"*2\r\n$4\r\nAUTH\r\n$15\r\nof-the-operator\r\n"
    script = b"*3\r\n$4\r\nEVAL\r\n$17\r\nwhile true do end\r\n$1\r\n0\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(login + script)
        server.await_reply(b"-BUSY", "GET", "x")
        try:
            yield
        finally:
            server.command("SCRIPT", "KILL")
            server.await_reply(b"+PONG", "PING")


async def test_a_store_that_is_busy_for_a_while_does_not_refuse_users(server: ValkeyProcess) -> None:
    async with manager_of(server.url) as (manager, _, _):
        access = await manager.ensure(KEY)
        with busy(server):
            for key in (KEY, OTHER):
                with pytest.raises(StateUnavailable, match="BUSY"):
                    await manager.ensure(key)
            assert manager.last(KEY, reason="") == access
            # Nor is a user taken for gone that could not be deleted.
            with pytest.raises(StateUnavailable, match="BUSY"):
                await manager.drop(KEY)
        assert await manager.ensure(KEY) == access
        assert (await manager.ensure(OTHER)).is_own_user


@pytest.mark.parametrize(
    ("reply", "is_refusal"),
    [
        (NoPermissionError("User limited has no permissions to run the 'acl|setuser' command"), True),
        (ResponseError("unknown command 'ACL', with args beginning with: 'GETUSER' "), True),
        (ResponseError("unknown command `ACL`, with args beginning with: `GETUSER`, "), True),
        (ResponseError("Unknown subcommand or wrong number of arguments for 'SETUSER'. Try ACL HELP."), True),
        (ResponseError("unknown subcommand 'SETUSER'. Try ACL HELP."), True),
        (ResponseError("ERR unsupported command 'acl'"), True),
        (ResponseError("Command is not available: 'ACL'."), True),
        (ResponseError("ERR Command is not available: 'ACL SETUSER'. See https://upstash.com/docs for details"), True),
        (ResponseError("command is not allowed"), True),
        (ResponseError("ERR command 'ACL' not support for normal user"), True),
        (ResponseError("ERR ACL SETUSER command is disabled on this instance"), True),
        (ResponseError("ERR max number of users reached"), True),
        (ResponseError("ERR user limit exceeded"), True),
        (ResponseError("ERR max daily request limit exceeded. Limit: 10000, Usage: 10001."), False),
        (ResponseError("ERR rate limit exceeded for user default"), False),
        (ResponseError("ERR max number of clients reached"), False),
        (OutOfMemoryError("command not allowed under OOM prevention."), False),
        (ResponseError("Error in ACL SETUSER modifier '+get': Unknown command or category name in ACL"), True),
        (ResponseError("BUSY Redis is busy running a script. You can only call SCRIPT KILL."), False),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots. Commands are disabled"), False),
        (ReadOnlyError("You can't write against a read only replica."), False),
        (MasterDownError("Link with MASTER is down and replica-serve-stale-data is set to 'no'."), False),
        (ClusterDownError("The cluster is down"), False),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), False),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), False),
        (ResponseError("something that nobody has heard yet"), False),
    ],
)
async def test_only_what_says_that_there_are_no_users_is_a_refusal(reply: Exception, is_refusal: bool) -> None:
    class Answers(Store):
        """A server that says this to everything."""

        async def on_each_server(self, *command: str | bytes | int) -> dict[str, Any]:
            return {"server": reply}

    store = Answers(parse_store_url("redis://operator:own@127.0.0.1:1"), StateSettings())
    manager = StoreAccessManager(store, install(store_url="redis://operator:own@127.0.0.1:1"))
    if is_refusal:
        access = await manager.ensure(KEY)
        assert not access.is_own_user
        assert str(reply) in access.notes[0]
    else:
        with pytest.raises(StateUnavailable, match=re.escape(str(reply))):
            await manager.ensure(KEY)
    await store.close()


class HeldStore(Store):
    """The real store, where `ACL SETUSER` for some waits until it may go on."""

    def __init__(self, url: str) -> None:
        super().__init__(parse_store_url(url), StateSettings())
        self.held: str | None = None
        self.reached, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def on_each_server(self, *command: str | bytes | int) -> dict[str, Any]:
        if command[:2] == ("ACL", "SETUSER") and command[2] == self.held:
            self.reached.set()
            await self.may_go_on.wait()
        return await super().on_each_server(*command)


async def test_the_user_of_a_pool_that_is_dropped_while_it_is_made_again_does_not_come_back(
    server: ValkeyProcess,
) -> None:
    store = HeldStore(server.url)
    manager = StoreAccessManager(store, install(store_url=server.url))
    await manager.ensure(KEY)
    server.command("ACL", "DELUSER", user_name(KEY))
    store.held = user_name(KEY)
    looking = asyncio.create_task(manager.look_after())
    await store.reached.wait()
    dropping = asyncio.create_task(manager.drop(KEY))
    await asyncio.sleep(0)
    store.may_go_on.set()
    await asyncio.gather(looking, dropping)
    assert user_name(KEY).encode() not in server.command("ACL", "USERS")
    assert await manager.look_after() == 0
    await store.close()


async def test_a_pool_that_is_dropped_while_others_are_looked_after_is_left_alone(server: ValkeyProcess) -> None:
    store = HeldStore(server.url)
    manager = StoreAccessManager(store, install(store_url=server.url))
    for key in (KEY, OTHER):
        await manager.ensure(key)
        server.command("ACL", "DELUSER", user_name(key))
    store.held = user_name(KEY)
    looking = asyncio.create_task(manager.look_after())
    await store.reached.wait()
    await manager.drop(OTHER)
    store.may_go_on.set()
    assert await looking == 1
    assert user_name(KEY).encode() + b"\r\n" in server.command("ACL", "USERS")
    assert user_name(OTHER).encode() not in server.command("ACL", "USERS")
    await store.close()


async def test_a_pool_whose_user_cannot_be_made_again_does_not_keep_the_others_waiting(server: ValkeyProcess) -> None:
    class Odd(Store):
        """Answers nothing about one user."""

        odd = ""

        async def on_each_server(self, *command: str | bytes | int) -> dict[str, Any]:
            if self.odd in command:
                raise StateUnavailable("ConnectionError: by the test")
            return await super().on_each_server(*command)

    store = Odd(parse_store_url(server.url), StateSettings())
    manager = StoreAccessManager(store, install(store_url=server.url))
    for key in (KEY, OTHER):
        await manager.ensure(key)
        server.command("ACL", "DELUSER", user_name(key))
    store.odd = user_name(KEY)
    with pytest.raises(StateUnavailable, match="by the test"):
        await manager.look_after()
    assert user_name(OTHER).encode() + b"\r\n" in server.command("ACL", "USERS")
    store.odd = ""
    assert await manager.look_after() == 1
    await store.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "noeviction"])
@pytest.mark.parametrize("missing", ["", "-info", "-config", "-info -config"])
async def test_a_store_that_evicts_keys_is_told_of_as_far_as_it_may_be_asked(
    server: ValkeyProcess, policy: str, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.command("CONFIG", "SET", "maxmemory-policy", policy)
    server.command("ACL", "SETUSER", "limited", "on", ">pw", "~*", "+@all", *missing.split())
    async with manager_of(server.url.replace(":of-the-operator@", "limited:pw@")) as (manager, _, _):
        access = await manager.ensure(KEY)
        expected = "" if policy == "noeviction" or missing == "-info -config" else policy
        assert access.evicts == expected
        assert access.is_own_user
        assert ("set it to noeviction" in caplog.text) is bool(expected)
        # Not asked at every look.
        server.command("CONFIG", "RESETSTAT")
        await manager.ensure(KEY)
        assert b"cmdstat_info" not in server.command("INFO", "commandstats")


async def test_a_password_that_the_operator_reads_from_a_file_is_written_into_a_pools_copy(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("of the operator\n")
    with running(password="of the operator", config='rename-command ACL ""\n') as server:
        async with manager_of(f"redis://127.0.0.1:{server.port}?password_file={file}") as (manager, _, _):
            access = await manager.ensure(KEY)
            assert str(file) not in access.url
            async with logged_in(access.url) as store:
                assert await store.execute("PING")


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within 30 s: {what}")


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[ValkeyProcess, ValkeyProcess, ValkeyProcess]]:
    """Two masters with half of the slots each, and a replica of the first."""
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
    with running(arguments=options) as one, running(arguments=options) as two, running(arguments=options) as three:
        one.command("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
        two.command("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
        for other in (two, three):
            one.command("CLUSTER", "MEET", "127.0.0.1", str(other.port))
        nodes = (one, two, three)
        for node in nodes:
            await until(lambda node=node: b"cluster_known_nodes:3" in node.command("CLUSTER", "INFO"), "cluster")
        name = one.command("CLUSTER", "MYID").split(b"\r\n")[1].decode()
        await until(lambda: three.command("CLUSTER", "REPLICATE", name).startswith(b"+OK"), "replica")
        for node in nodes:
            await until(lambda node=node: b"cluster_state:ok" in node.command("CLUSTER", "INFO"), "cluster")
            await until(lambda node=node: b"slave" in node.command("CLUSTER", "NODES"), "replica")
        yield nodes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_every_node_of_a_cluster_knows_the_user() -> None:
    async with cluster() as nodes, manager_of(f"redis+cluster://127.0.0.1:{nodes[0].port}") as (manager, _, _):
        accesses = [await manager.ensure(key) for key in (KEY, OTHER)]
        assert all(user_name(KEY).encode() in node.command("ACL", "USERS") for node in nodes)
        for access, key in zip(accesses, (KEY, OTHER), strict=True):
            async with logged_in(access.url) as store:
                own = PoolKeys(key.namespace, key.name)
                await store.batch([("SET", own.control, "x"), ("GET", own.control)], atomic=True)
                assert await store.execute("GET", own.control) == b"x"
                assert re.search("NOPERM|NoPermission", await refusal(store, "GET", "anything"))
        # One node forgets, and has it again.
        nodes[2].command("ACL", "DELUSER", user_name(KEY))
        assert await manager.look_after() == 1
        assert user_name(KEY).encode() in nodes[2].command("ACL", "USERS")
        # One node is away: the others are looked after.
        nodes[2].kill()
        nodes[0].command("ACL", "DELUSER", user_name(KEY))
        assert await manager.look_after() == 1
        assert (await manager.ensure(KEY)).is_own_user
        await manager.drop(KEY)
        assert user_name(KEY).encode() + b"\r\n" not in nodes[1].command("ACL", "USERS")


async def test_the_master_that_sentinels_have_promoted_gets_the_users() -> None:
    port = free_port()
    with watched_by_a_sentinel() as (first, second, sentinel):
        url = f"redis+sentinel://127.0.0.1:{sentinel.port},127.0.0.1:{port}/main"
        async with manager_of(url) as (manager, _, _):
            access = await manager.ensure(KEY)
            assert access.url.endswith(f"@127.0.0.1:{sentinel.port},127.0.0.1:{port}/main")
            first.kill()
            await until(lambda: b"role:master" in second.command("INFO", "replication"), "failover")
            for _ in range(300):
                with contextlib.suppress(StateUnavailable):
                    await manager.ensure(KEY)
                    break
                await asyncio.sleep(0.1)
            assert user_name(KEY).encode() in second.command("ACL", "USERS")
            async with logged_in(access.url) as store:
                assert await store.execute("GET", OWN_PREFIX + "x") is None


async def test_the_operators_own_work_goes_on_beside_the_users(server: ValkeyProcess) -> None:
    async with manager_of(server.url) as (manager, operator, _):
        access = await manager.ensure(KEY)
        keys = PoolKeys(KEY.namespace, KEY.name)
        writer = ControlWriter(operator, keys)
        await writer.put(ControlDocument(namespace=KEY.namespace, name=KEY.name, endpoints=()))
        async with logged_in(access.url) as store:
            assert await store.execute("GET", keys.control)
        await writer.delete_pool()
        assert await operator.keys_with_prefix(keys.prefix, 10) == []


URLS = [
    "redis://h",
    "redis://old:pw@h:1/3",
    "redis://:pw@h/0",
    "redis://h?username=u&password=p&db=2",
    "valkey://u@h:6379?password_file=/run/secrets/p",
    "rediss://u:p%40%2F@h:6380/1?ssl_check_hostname=false&ssl_cert_reqs=none&ssl_certfile=/c&ssl_keyfile=/k",
    "unix:///run/redis.sock?db=4",
    "unix://u:p@/run/redis.sock",
    "rediss+sentinel://u:p@a:1,[::1]:2,c/main/2?sentinel_username=s&sentinel_password=t%20t&client_name=x",
    "redis+cluster://u:p@a:1,b:2",
]


@pytest.mark.parametrize("url", URLS)
def test_another_login_changes_nothing_else_of_a_url(url: str) -> None:
    before, after = parse_store_url(url), parse_store_url(with_login(url, "trimtab-ns.chat", "p:@/ %"))
    assert (after.username, after.password, after.password_file) == ("trimtab-ns.chat", "p:@/ %", None)
    for field in before.__slots__:
        if field not in ("username", "password", "password_file"):
            assert getattr(after, field) == getattr(before, field), field


def test_the_authorities_that_the_operator_trusts_travel_with_the_url(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("-----BEGIN CERTIFICATE-----\nab+/=\n-----END CERTIFICATE-----\n")
    url = f"rediss://u:p@h?ssl_ca_certs={file}&ssl_check_hostname=false"
    for copy in (with_login(url, "a", "b"), as_given(url)):
        address = parse_store_url(copy)
        assert address.ca_data == file.read_text()
        assert address.ca_certs is None
        assert not address.check_hostname
        assert files_left_out(copy) == ()
    assert files_left_out("rediss://h?ssl_certfile=/c&ssl_keyfile=/k") == ("ssl_certfile", "ssl_keyfile")


def test_what_is_always_allowed_reaches_no_key() -> None:
    with running() as server:
        for command in CONNECTION_COMMANDS:
            found = server.command("COMMAND", "DOCS", command.replace(" ", "|"))
            assert found.startswith(b"*"), command
            info = server.command("COMMAND", "INFO", command)
            assert b"~keyspace" not in info or command in ("exec", "asking"), command
