"""The pool's Secret, as the kubelet keeps it in a folder: it comes late, changes, goes."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from sidecar_processes import NAMESPACE, POOL, SECRET, Pod, process
from valkey_server import ValkeyProcess, running
from zmq_engine import until

from trimtab_core.chunks import pool_seed, seed_digest
from trimtab_sidecar import pool_access
from trimtab_sidecar.pool_access import CURRENT, AccessError, AccessFolder, PoolAccess
from trimtab_sidecar.settings import parse_settings
from trimtab_sidecar.sidecar import Sidecar


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with running() as server:
        yield server


class Mount:
    """A Secret's volume: each of its files is a link through one that is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._generation = 0
        folder.mkdir()

    def put(self, **files: str) -> None:
        self._generation += 1
        place = self.folder / f"..{self._generation}"
        place.mkdir()
        for name, text in files.items():
            (place / name.replace("_", "-")).write_text(text)
        link = self.folder / "..new"
        link.symlink_to(place.name)
        link.replace(self.folder / CURRENT)

    def access(self) -> AccessFolder:
        return AccessFolder(folder=self.folder, namespace=NAMESPACE, name=POOL)


def test_a_folder_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "access")
    access = mount.access()
    assert access.read() is None
    mount.put(store_url="redis://store")
    assert access.read() is None
    mount.put(store_url="redis://store\n", secret="s\n")
    assert access.read() == PoolAccess(store_url="redis://store", seed=pool_seed(b"s", NAMESPACE, POOL))
    mount.put()
    assert access.read() is None
    mount.put(store_url="http://store", secret="s")
    with pytest.raises(AccessError, match="store-url"):
        access.read()
    assert AccessFolder(folder=tmp_path / "nowhere", namespace="n", name="p").read() is None


async def test_one_that_makes_no_sense_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_access, "LOOK_S", 0.001)
    mount = Mount(tmp_path / "access")
    mount.put(store_url="http://store", secret="s")
    finding = asyncio.create_task(mount.access().found())
    await until(lambda: "store-url" in "".join(str(record.__dict__.get("error")) for record in caplog.records))
    assert not finding.done(), "the engine serves all the same"
    mount.put(store_url="redis://store", secret="s")
    assert (await finding).store_url == "redis://store"


async def test_what_it_changed_to_counts_whatever_is_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_access, "LOOK_S", 0.001)
    mount = Mount(tmp_path / "access")
    mount.put(store_url="redis://one", secret="s")
    worked_with: list[str] = []
    settings = parse_settings(
        ["--pool-name", POOL, "--pool-namespace", NAMESPACE, "--endpoint-host", "10.0.0.1",
         "--access-dir", str(mount.folder), "--metrics-port", "-1"],
        {},
    )  # fmt: skip
    sidecar = Sidecar(settings)

    async def work_with(access: PoolAccess) -> None:
        worked_with.append(access.store_url)
        try:
            await asyncio.Event().wait()
        finally:  # its last words take a moment, and it changes once more
            if access.store_url == "redis://one":
                mount.put(store_url="http://nonsense", secret="s")
                await asyncio.sleep(0.01)

    monkeypatch.setattr(sidecar, "_work_with", work_with)
    working = asyncio.create_task(sidecar._work())
    for number, url in enumerate(("redis://one", "redis://two", "redis://three"), 1):
        mount.put(store_url=url, secret="s")
        await until(lambda number=number: len(worked_with) == number or working.done())
    assert worked_with == ["redis://one", "redis://two", "redis://three"]
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path / "access")


async def test_a_sidecar_waits_for_its_secret_says_so_and_takes_another_one_up(
    server: ValkeyProcess, tmp_path: Path, mount: Mount
) -> None:
    async with aiohttp.ClientSession() as http:
        pod = Pod(server.url, tmp_path, http)
        try:
            await pod.start_engine()
            sidecar = await pod.start_sidecar("--access-dir", str(mount.folder))
            await pod.follow()
            await answers(pod)
            assert (await pod.own_metrics())["waits_for_secret"] == 1
            assert [log for log in pod.logs() if "waiting for the pool's Secret" in log["message"]]
            assert pod.heartbeat() is None
            # The engine serves meanwhile: the sidecar is not asked.
            await pod.chat("A text")

            mount.put(store_url=server.url, secret=SECRET)
            beat = await pod.serves()
            assert beat.seed_digest == seed_digest(pool_seed(SECRET.encode(), NAMESPACE, POOL))
            assert (await pod.own_metrics())["waits_for_secret"] == 0
            await pod.chat("A text of some length, so that there are blocks of it, and chunks of those, too.")
            assert await pod.agrees() > 0

            mount.put()
            mount.put(store_url=server.url, secret="another")
            digest = seed_digest(pool_seed(b"another", NAMESPACE, POOL))
            await until(lambda: (b := pod.heartbeat()) is not None and b.seed_digest == digest)
            # What the engine held before is read again from its replay.
            live = len(await pod.live_chunks())
            for _ in range(600):
                if (await pod.own_metrics()).get("chunks") == live:
                    break
                await asyncio.sleep(0.05)
            assert (await pod.own_metrics())["chunks"] == live > 0
            assert sidecar.returncode is None
            assert await pod.terminate() == 0
        finally:
            await pod.close()


async def test_a_pod_that_goes_before_its_secret_came_has_nothing_to_tell(tmp_path: Path, mount: Mount) -> None:
    async with aiohttp.ClientSession() as http:
        pod = Pod("redis://127.0.0.1:1", tmp_path, http)
        try:
            pod.url = "http://127.0.0.1:1"
            await pod.start_sidecar("--access-dir", str(mount.folder))
            await answers(pod)
            for _ in range(2):
                words = pod.sidecar_words("--access-dir", str(mount.folder))
                async with process(
                    sys.executable, "-m", "trimtab_sidecar", "drain", *words, log=tmp_path / "drain.log"
                ) as drain:
                    assert await drain.wait() == 0
                if pod.sidecar is not None and pod.sidecar.returncode is None:
                    assert await pod.terminate() == 0
        finally:
            await pod.close()


async def answers(pod: Pod) -> None:
    """The probe of its life is answered."""
    for _ in range(600):
        with contextlib.suppress(aiohttp.ClientError):
            async with pod.http.get(f"http://127.0.0.1:{pod.metrics_port}/healthz") as response:
                assert response.status == 200
                return
        await asyncio.sleep(0.05)
    raise AssertionError((pod.directory / "sidecar.log").read_text())
