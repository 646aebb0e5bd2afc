"""Publishers and followers over a real store: what one process writes is what the others see."""

from pool_mirror import PoolMirror
from pool_processes import KEYS, QUICK, Replica, Sidecar, tasks, until

from trimtab_state import (
    ControlDocument,
    ControlWriter,
    EndpointSpec,
    PoolFollower,
    ServedModel,
    connect,
)

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


async def test_a_follower_sees_chunks_load_documents_and_cards(store_url: str) -> None:
    store = connect(store_url, QUICK)
    sidecar, one, two = Sidecar(store, A, QUICK), Replica(store, QUICK), Replica(store, QUICK)
    control = ControlWriter(store, KEYS, settings=QUICK)
    document = ControlDocument(
        namespace="default", name="pool", endpoints=(EndpointSpec(name=A, address=A), EndpointSpec(name=B, address=B))
    )
    async with tasks(
        sidecar.publisher.run(), one.publisher.run(), two.publisher.run(), one.follower.run(), two.follower.run()
    ):
        assert await control.put(document) == 1
        sidecar.publisher.card("d1", b"the card")
        sidecar.beat(models={"m": ServedModel(card="d1")}, running=3)
        sidecar.add({1: 16, 2: 32, 3: 48})
        sidecar.remove([2])
        one.reserve(1, A, 500, samples=3)
        one.reserve(2, B, 70)
        one.reserve(3, A, 70)
        one.first_token(1)
        one.move(2, A)
        one.finish(3)
        await until(lambda: two.mirror.open_load() == one.load(), "load")
        await until(lambda: two.mirror.chunks.get(A) == {1: 16, 3: 48}, "chunks")
        await until(lambda: one.mirror.chunks.get(A) == {1: 16, 3: 48}, "chunks of the other")
        await until(lambda: two.mirror.heartbeats[A].running == 3)
        assert two.mirror.cards == {"d1": b"the card"}
        await until(lambda: bool(two.mirror.controls) and two.mirror.controls[-1] is not None)
        seen = two.mirror.controls[-1]
        assert seen is not None
        assert [e.name for e in seen.endpoints] == [A, B]
        assert seen.version == 1
        assert one.publisher.incarnation not in one.mirror.peers
        assert A not in two.mirror.unsynced
    await store.close()


def test_the_lag_grows_while_the_store_cannot_be_asked() -> None:
    follower = PoolFollower(connect("redis://127.0.0.1:1"), KEYS, PoolMirror())
    assert follower.log_lag_s(50.0) == 0.0
    follower._lag_s, follower._lag_at_s = 0.25, 100.0
    assert follower.log_lag_s(101.0) == 0.25
    assert follower.log_lag_s(112.0) == 0.25 + 10.0
