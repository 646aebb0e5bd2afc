"""A replica as a process of its own, to be killed and stopped: three open reservations; prints its incarnations."""

import asyncio
import sys

from pool_processes import BRIEF, Replica

from trimtab_state import connect


async def main(url: str) -> None:
    store = connect(url, BRIEF)
    replica = Replica(store, BRIEF)
    replica.publisher._on_lease_lost = lambda: print(replica.publisher.incarnation, flush=True)
    for reservation_id in (1, 2, 3):
        replica.reserve(reservation_id, "a", 100 * reservation_id)
    print(replica.publisher.incarnation, flush=True)
    await replica.publisher.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
