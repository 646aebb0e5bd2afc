"""500 pods, ten changes a second: each one reaches the control document. TRIMTAB_CHURN_S sets how long (60 in full)."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from membership_pods import Pods, following
from valkey_server import ValkeyProcess

from trimtab_operator.kube import Kube
from trimtab_operator.membership.control_publisher import ControlPublisher
from trimtab_state import Policy, PoolKeys, Store, connect
from trimtab_state.documents import decode_control

PODS = 500
CHANGES_PER_S = 10
BLOCK = 20
CHURN_S = float(os.environ.get("TRIMTAB_CHURN_S", "5"))


class Document:
    """The control document as the store holds it, and how long each expected change took to get there."""

    def __init__(self, store: Store, keys: PoolKeys) -> None:
        self.members: set[str] = set()
        self.versions = 0
        self.delays_s: list[float] = []
        self.waiting: dict[str, tuple[bool, float]] = {}
        self._store = store
        self._keys = keys

    async def run(self) -> None:
        before = None
        while True:
            data = await self._store.execute("GET", self._keys.control)
            if data is not None and data != before:
                before = data
                self.versions += 1
                self.members = {e.address.partition(":")[0] for e in decode_control(data).endpoints}
            for ip, (is_member, since_s) in list(self.waiting.items()):
                if (ip in self.members) == is_member:
                    self.delays_s.append(time.monotonic() - since_s)
                    del self.waiting[ip]
            await asyncio.sleep(0.005)


@pytest.mark.timeout(240)
async def test_no_change_is_missed(kube: Kube, namespace: str, tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path)
    server.start()
    store = connect(server.url)
    keys = PoolKeys(namespace, "chat")
    pods, document, publisher = Pods(kube, namespace), Document(store, keys), ControlPublisher(store, keys)
    publisher.set_policy(Policy())
    ips = {f"p{n}": f"127.2.{n // 250}.{n % 250 + 1}" for n in range(PODS)}
    await pods.add_many(ips)
    tasks = [asyncio.create_task(publisher.run()), asyncio.create_task(document.run())]
    try:
        async with following(kube, namespace, on_members=publisher.set_members) as (_, told):
            await told.until_true(lambda: len(told.all[-1].endpoints) == PODS)
            while len(document.members) < PODS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            busy_s, start_s, changes, smallest = time.process_time(), time.monotonic(), 0, PODS
            while (now_s := time.monotonic()) < start_s + CHURN_S:
                # A block of pods goes, half of them deleted and half of them unready; then the same block comes back.
                block, place = divmod(changes, 2 * BLOCK)
                number = (block * BLOCK + place % BLOCK) % PODS
                name, ip, goes = f"p{number}", ips[f"p{number}"], place < BLOCK
                document.waiting[ip] = (not goes, now_s)
                if number % 2:
                    await pods.set(name, ip, ready=not goes)
                elif goes:
                    await pods.delete(name)
                else:
                    await pods.add(name, ip)
                changes += 1
                smallest = min(smallest, len(document.members))
                await asyncio.sleep(max(0.0, start_s + changes / CHANGES_PER_S - time.monotonic()))
            seconds = time.monotonic() - start_s
            async with asyncio.timeout(30):
                while document.waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            found = sorted(document.delays_s)
            print(
                f"\n{changes} changes in {seconds:.1f} s, {document.versions} documents, {smallest} to {PODS} members;"
                f" from before the API call to the document:"
                f" p50 {found[len(found) // 2] * 1e3:.0f} ms, p99 {found[int(len(found) * 0.99)] * 1e3:.0f} ms,"
                f" max {found[-1] * 1e3:.0f} ms; CPU of the whole test process"
                f" {(time.process_time() - busy_s) / seconds:.0%}"
            )
            assert len(found) == changes
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await store.close()
        server.kill()
