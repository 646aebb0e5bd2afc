"""What `helm test` runs: all is well, and each thing that may be wrong is told with what to do about it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from valkey_server import ValkeyProcess, free_port

from trimtab_operator.install_check import Finding, answers_ready, check, is_served, store_answers
from trimtab_operator.kube import POLICIES, POOLS, Kube, Resource


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path, password="secret", arguments=["--maxmemory-policy", "noeviction"])
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def pages() -> AsyncIterator[str]:
    """An operator that is ready at `/ready`, and one that is not at `/waits`."""

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def waits(_: web.Request) -> web.Response:
        return web.Response(status=503, text="list of inferencepools\n")

    app = web.Application()
    app.router.add_get("/ready/readyz", ready)
    app.router.add_get("/waits/readyz", waits)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_store_that_lets_us_in_is_well(store: ValkeyProcess) -> None:
    finding = await store_answers(store.url)
    assert finding.fault == ""
    assert "secret" not in finding.note


async def test_a_store_with_another_password_is_told(store: ValkeyProcess) -> None:
    finding = await store_answers(store.url.replace("secret", "other"))
    assert "password" in finding.fault
    assert not finding.is_final


async def test_a_store_that_is_not_there_is_told() -> None:
    finding = await store_answers(f"redis://127.0.0.1:{free_port()}")
    assert "Is it up" in finding.fault


async def test_a_store_that_throws_keys_away_is_told_at_once(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, arguments=["--maxmemory-policy", "allkeys-lru"])
    server.start()
    try:
        finding = await store_answers(server.url)
    finally:
        server.kill()
    assert "allkeys-lru" in finding.fault
    assert "noeviction" in finding.fault
    assert finding.is_final


@pytest.mark.parametrize("url", ["", "redis://", "http://store"])
async def test_a_url_that_is_none_is_told_at_once(url: str) -> None:
    finding = await store_answers(url)
    assert "store.*" in finding.fault
    assert finding.is_final


async def test_a_process_that_is_ready_is_well(pages: str) -> None:
    assert (await answers_ready(f"{pages}/ready")).fault == ""


async def test_a_process_that_waits_is_told_with_its_reason(pages: str) -> None:
    assert "list of inferencepools" in (await answers_ready(f"{pages}/waits")).fault


async def test_a_process_that_is_not_there_is_told() -> None:
    assert "cannot be reached" in (await answers_ready(f"http://127.0.0.1:{free_port()}")).fault


async def test_kinds_that_are_served_are_well_and_others_are_told(kube: Kube) -> None:
    for resource in (POOLS, POLICIES):
        assert (await is_served(kube, resource)).fault == ""
    missing = Resource("trimtab.dev/v9", "schedulingpolicies", "SchedulingPolicy")
    assert "kubectl apply --server-side -f crds/" in (await is_served(kube, missing)).fault
    unknown = Resource("trimtab.dev/v1alpha1", "others", "Other")
    assert "Other" in (await is_served(kube, unknown)).fault


async def test_what_starts_is_waited_for_and_what_is_wrong_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trimtab_operator.install_check.PAUSE_S", 0.0)
    looks = {"late": 0, "wrong": 0}

    async def late() -> Finding:
        looks["late"] += 1
        return Finding(note="here") if looks["late"] == 3 else Finding(fault="not yet")

    async def wrong() -> Finding:
        looks["wrong"] += 1
        return Finding(fault="never", is_final=True)

    assert not await check({"late": late, "wrong": wrong}, timeout_s=60)
    assert looks == {"late": 3, "wrong": 1}
    assert set(capsys.readouterr().out.splitlines()) == {"ok      late: here", "FAILED  wrong: never"}


async def test_what_does_not_come_is_told_when_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    async def never() -> Finding:
        return Finding(fault="not yet")

    async with asyncio.timeout(10):
        assert not await check({"it": never}, timeout_s=0)
    assert capsys.readouterr().out == "FAILED  it: not yet\n"
