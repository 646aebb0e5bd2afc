"""The same pool over every kind of store: Unix socket, password, TLS, Sentinel, Cluster. All of them real servers."""

import asyncio
import gc
import re
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pool_processes import KEYS, tasks, until
from test_store_faults import World, started
from valkey_server import ValkeyProcess, free_port, running, watched_by_a_sentinel

from trimtab_state import StateSettings, StateUnavailable, connect
from trimtab_state.store import CONNECTIONS_MAX


async def lives(url: str) -> None:
    """A whole pool works over this URL."""
    world = World(url)
    async with tasks(*world.all()):
        await started(world)
        for _ in range(5):
            world.work(10)
            await asyncio.sleep(0.02)
        await world.settled("over this store")
        world.lost_nothing()
    await world.store.close()


async def test_over_a_unix_socket(server: ValkeyProcess) -> None:
    await lives(server.unix_url)


async def test_in_another_database(server: ValkeyProcess) -> None:
    await lives(server.url.removesuffix("/0") + "/3")
    assert b"db3:" in server.command("INFO", "keyspace")


async def test_with_a_user_and_password(server: ValkeyProcess) -> None:
    server.command("ACL", "SETUSER", "pool", "on", ">p@ss/word", f"~{KEYS.prefix}*", "+@all", "-@dangerous")
    server.command("ACL", "SETUSER", "default", "off")
    await lives(server.url.replace("redis://", "redis://pool:p%40ss%2Fword@"))


async def test_a_rotated_password_file_is_read_again(tmp_path: Path) -> None:
    with running(password="first") as server:
        secret = tmp_path / "password"
        secret.write_text("first\n")
        store = connect(f"redis://127.0.0.1:{server.port}?password_file={secret}")
        assert await store.execute("PING")
        server.command("CONFIG", "SET", "requirepass", "second")
        server.accept("second")
        server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(StateUnavailable):
            await asyncio.gather(*(store.execute("PING") for _ in range(3)))
        secret.write_text("second\n")
        assert await store.execute("PING")
        await store.close()


@asynccontextmanager
async def tls_in_front_of(server: ValkeyProcess, folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """A port that speaks TLS for the server, and the certificate to trust. (The test server is built without TLS.)"""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(key), "-out", str(certificate), "-days", "2"]
    await asyncio.to_thread(subprocess.run, [*make, *files, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    serving: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        finally:
            writer.close()
            serving.discard(task)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1], certificate
    finally:
        listener.close()
        await asyncio.gather(*serving)


async def test_over_tls_with_a_private_authority(server: ValkeyProcess, tmp_path: Path) -> None:
    async with tls_in_front_of(server, tmp_path) as (port, certificate):
        await lives(f"rediss://localhost:{port}?ssl_ca_certs={certificate}")


async def test_an_authority_without_the_extensions_of_a_strict_one_is_trusted(
    server: ValkeyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ssl.create_default_context

    def as_in_python_3_13(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        context = usual(*args, **kwargs)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_in_python_3_13)
    async with tls_in_front_of(server, tmp_path) as (port, certificate):
        await lives(f"rediss://localhost:{port}?ssl_ca_certs={certificate}")


async def test_a_certificate_that_is_not_trusted_is_a_store_that_is_away(server: ValkeyProcess, tmp_path: Path) -> None:
    async with tls_in_front_of(server, tmp_path) as (port, _):
        store = connect(f"rediss://localhost:{port}")
        with pytest.raises(StateUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await store.execute("PING")
        await store.close()
        store = connect(f"rediss://localhost:{port}?ssl_cert_reqs=none")
        assert await store.execute("PING")
        await store.close()


async def test_sentinel_failover_is_followed() -> None:
    port = free_port()
    with watched_by_a_sentinel() as (first, second, sentinel):
        world = World(f"redis+sentinel://127.0.0.1:{sentinel.port},127.0.0.1:{port}/main")
        async with tasks(*world.all()):
            await started(world)
            world.work()
            first.kill()
            await world.is_away()
            world.work()
            await until(lambda: second.says(b"role:master", "INFO", "replication"), "failover")
            await world.settled("after the failover")
            world.work()
            await world.settled("and further on")
            for replica in world.replicas:
                assert replica.mirror.gone_endpoints == []
        await world.store.close()


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[ValkeyProcess, ValkeyProcess]]:
    """Two nodes with half of the slots each."""
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
    with running(arguments=options) as one, running(arguments=options) as two:
        one.command("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
        two.command("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
        one.command("CLUSTER", "MEET", "127.0.0.1", str(two.port))
        for node in (one, two):
            await until(lambda node=node: node.says(b"cluster_state:ok", "CLUSTER", "INFO"), "cluster")
            await until(lambda node=node: node.says(b"cluster_known_nodes:2", "CLUSTER", "INFO"), "cluster")
        yield one, two


async def test_over_a_cluster_all_keys_of_a_pool_are_on_one_node() -> None:
    async with cluster() as (one, two):
        await lives(f"redis+cluster://127.0.0.1:{one.port}")
        sizes = sorted(int(node.command("DBSIZE")[1:]) for node in (one, two))
        assert sizes[0] == 0
        assert sizes[1] > 5


# The client forgets to close a node's connection when the cluster's layout is read again; the collector closes it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_cluster_node_that_was_killed_and_lost_its_data_is_filled_again() -> None:
    async with cluster() as (one, two):
        world = World(f"redis+cluster://127.0.0.1:{one.port},127.0.0.1:{two.port}")
        async with tasks(*world.all()):
            await started(world)
            owner = one if int(one.command("DBSIZE")[1:]) else two
            owner.kill()
            await world.is_away()
            world.work()
            owner.start()
            await world.settled("after the restart")
            world.lost_nothing()
        await world.store.close()
    gc.collect()


# As above.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_cluster_node_that_hangs_is_sent_no_more_than_it_has_connections_and_is_back_by_itself() -> None:
    async with cluster() as (one, two):
        settings = StateSettings(command_timeout_s=0.3, connect_timeout_s=0.3)
        store = connect(f"redis+cluster://127.0.0.1:{one.port},127.0.0.1:{two.port}", settings)
        await store.execute("SET", "{p}a", "1")
        owner = one if one.command("DBSIZE") == b":1\r\n" else two
        owner.pause()
        asked = [store.execute("GET", "{p}a") for _ in range(200)]
        asked += [store.batch([("GET", "{p}a"), ("GET", "{p}b")]) for _ in range(200)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(each, StateUnavailable) for each in found)
        assert store._hangs.is_any
        owner.resume()
        await until(lambda: not store._hangs.is_any, "nobody asks it, and it is back")
        async with asyncio.timeout(30):
            while True:
                with suppress(StateUnavailable):  # The nodes have to find each other first.
                    assert await store.execute("GET", "{p}a") == b"1"
                    break
                await store.pause(0.1)
        calls = re.search(rb"cmdstat_get:calls=(\d+)", owner.command("INFO", "commandstats"))
        assert calls is not None
        assert int(calls[1]) <= 2 * CONNECTIONS_MAX
        await store.close()
    gc.collect()


async def test_over_tls_with_the_authority_in_the_url(server: ValkeyProcess, tmp_path: Path) -> None:
    async with tls_in_front_of(server, tmp_path) as (port, certificate):
        store = connect(f"rediss://localhost:{port}?ssl_ca_data={quote(certificate.read_text(), safe='')}")
        assert await store.execute("PING")
        assert list((await store.on_each_server("PING")).values()) == [True]
        await store.close()
