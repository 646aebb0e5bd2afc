"""Random faults against a real server, with processes that restart meanwhile. The seed of a run is in its name."""

import asyncio
import random
from contextlib import suppress

import pytest
from pool_processes import QUICK, Sidecar
from test_store_faults import KEYS, World, started
from valkey_server import ValkeyProcess


class Chaos:
    """A world whose parts can be restarted one by one."""

    def __init__(self, server: ValkeyProcess, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.world = World(server.url, QUICK, seed)
        self.tasks: dict[object, list[asyncio.Task[None]]] = {}

    def start(self, part: object, *coroutines: object) -> None:
        self.tasks[part] = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]

    async def stop(self, part: object) -> None:
        for task in self.tasks.pop(part):
            if task.done():
                task.result()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def start_sidecar(self, sidecar: Sidecar) -> None:
        sidecar.publisher.card("d", b"card")
        self.start(sidecar, sidecar.publisher.run(), self.world.beating(sidecar))

    async def restart_sidecar(self) -> None:
        index = self.rng.randrange(2)
        old = self.world.sidecars[index]
        await self.stop(old)
        new = Sidecar(self.world.store, old.endpoint, QUICK)
        if self.rng.getrandbits(1):
            new.chunks.update(old.chunks)  # From its checkpoint.
        self.world.sidecars[index] = new
        self.start_sidecar(new)

    async def restart_follower(self) -> None:
        replica = self.rng.choice(self.world.replicas)
        await self.stop(replica.follower)
        self.start(replica.follower, replica.follower.run())

    async def lose_connections(self) -> None:
        self.server.command("CLIENT", "KILL", "TYPE", "normal")

    async def trim(self) -> None:
        for stream in (KEYS.kv_log, KEYS.load_log, KEYS.notify):
            if self.rng.getrandbits(1):
                self.server.command("XTRIM", stream, "MAXLEN", str(self.rng.randrange(5)))

    async def remove_a_key(self) -> None:
        keys = [KEYS.control, KEYS.generation, KEYS.kv_log, KEYS.load_log, KEYS.notify, KEYS.endpoints, KEYS.replicas]
        keys += [key for s in self.world.sidecars for key in (KEYS.kv_snapshot(s.endpoint), KEYS.heartbeat(s.endpoint))]
        keys += [KEYS.replica(r.publisher.incarnation) for r in self.world.replicas] + [KEYS.card("d")]
        self.server.command("DEL", self.rng.choice(keys))

    async def flush(self) -> None:
        self.server.command("FLUSHALL")

    async def restart_empty(self) -> None:
        self.server.kill()
        self.world.work(5)
        await asyncio.sleep(self.rng.random() * 0.1)
        self.server.start()

    async def pause(self) -> None:
        self.server.pause()
        self.world.work(5)
        await asyncio.sleep(self.rng.random() * 0.2)
        self.server.resume()

    async def run(self, faults: int) -> None:
        world = self.world
        self.start(world.control, world.control.run())
        for sidecar in world.sidecars:
            self.start_sidecar(sidecar)
        for replica in world.replicas:
            self.start(replica.publisher, replica.publisher.run())
            self.start(replica.follower, replica.follower.run())
        try:
            await started(world)
            kinds = [self.restart_sidecar, self.restart_follower, self.lose_connections, self.trim, self.remove_a_key]
            kinds += [self.trim, self.remove_a_key, self.flush, self.restart_empty, self.pause]
            for _ in range(faults):
                await self.rng.choice(kinds)()
                world.work(self.rng.randrange(8))
                await asyncio.sleep(self.rng.random() * 0.03)
            world.work(5)
            await world.settled("after the faults")
        finally:
            for part in list(self.tasks):
                await self.stop(part)
            await world.store.close()


@pytest.mark.parametrize("seed", range(4))
async def test_random_faults_leave_every_replica_with_exactly_what_the_writers_hold(
    server: ValkeyProcess, seed: int
) -> None:
    await Chaos(server, seed).run(faults=40)
