"""How far several pickers go past an endpoint's limit: real schedulers, each with a queue of its own, in virtual time.

    python bench/limits.py [--pickers 1,2,4,8] [--limit 12] [--endpoints 4] [--seeds 20] [--seconds 30] [--json]

Each picker books its own requests at once and hears of the others' after a lag, in the order of each writer; it lets
requests wait, tries the first of them when one of its own has ended, and every 20 ms, as the pickers do. Loads:
`burst` 4 x the pool's places within 10 ms at an idle pool; `full` arrivals at 1.2 x of what it can serve; `brim` at
0.95 x, where requests that do not fit are refused. `beyond` is the share of placements that came to more than the
limit, `most` the largest number of requests that an endpoint ever had, `bound` what it can be at worst. Where nothing
can be known late (one picker) every figure has to be 0, or none is given.
"""

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from trimtab_core.placement import PlacementRequest, Prompt, Rejection
from trimtab_core.selection import Scheduler
from trimtab_core.settings import SchedulerSettings

TICK_S = 0.02
"""The pickers' own, between two looks at those who wait."""
SERVICE_S = 2.0
"""Mean time of a request on its endpoint."""
WAIT_S = 10.0
NO_CHAIN = np.zeros(0, dtype=np.uint64)
NO_TOKENS = np.zeros(0, dtype=np.uint32)


class Picker:
    def __init__(self, pool: "Pool", number: int) -> None:
        self.pool = pool
        self.number = number
        self.scheduler: Any = Scheduler(rng_seed=number, settings=SchedulerSettings())
        for _ in range(pool.endpoints):
            self.scheduler.add_slot()
        self.waiting: deque[float] = deque()
        self.heard_until_s = 0.0
        """When the others hear of what it told last."""
        self.told_s = -1.0

    def arrive(self, now_s: float) -> None:
        if not self.waiting and self.place(now_s):
            return
        if self.pool.waits:
            self.waiting.append(now_s)

    def turns(self, now_s: float) -> None:
        while self.waiting and (now_s - self.waiting[0] > WAIT_S or self.place(now_s)):
            self.waiting.popleft()

    def place(self, now_s: float) -> bool:
        pool = self.pool
        placed = self.scheduler.place(
            PlacementRequest(
                prompts=((Prompt(chain=NO_CHAIN, size_bytes=400),),),
                variant_of_slot=pool.variants,
                exact=pool.all,
                candidates=pool.all,
                tokens_per_byte=0.25,
                batch_max=pool.limit,
            ),
            now_s,
        )
        if isinstance(placed, Rejection):
            return False
        slot, mine = placed.slot, placed.reservation_id
        pool.began(slot)
        self.tell(
            now_s, lambda peer, at_s: peer.peer_reserve(self.number, mine, slot, 100, 1, NO_CHAIN, NO_TOKENS, at_s)
        )
        pool.at(now_s + pool.rng.expovariate(1 / SERVICE_S), lambda at_s: self.end(mine, slot, at_s))
        return True

    def end(self, mine: int, slot: int, now_s: float) -> None:
        self.pool.on[slot] -= 1
        self.scheduler.finish(mine, now_s)
        self.tell(now_s, lambda peer, at_s: peer.peer_finish(self.number, mine, at_s))
        self.turns(now_s)

    def tell(self, now_s: float, say: Callable[[Any, float], None]) -> None:
        if now_s != self.told_s:  # what is told in one turn of the event loop is one message
            self.told_s = now_s
            self.heard_until_s = max(self.heard_until_s, now_s + self.pool.lag_s * self.pool.rng.uniform(0.5, 1.5))
        for peer in self.pool.pickers:
            if peer is not self:
                self.pool.at(self.heard_until_s, lambda at_s, peer=peer: say(peer.scheduler, at_s))  # type: ignore[misc]

    def tick(self, now_s: float) -> None:
        self.scheduler.advance(now_s)
        self.turns(now_s)
        self.pool.at(now_s + TICK_S, self.tick)


class Pool:
    def __init__(self, *, pickers: int, endpoints: int, limit: int, lag_s: float, waits: bool, seed: int) -> None:
        self.rng = random.Random(seed)
        self.endpoints = endpoints
        self.limit = limit
        self.lag_s = lag_s
        self.waits = waits
        self.all = np.ones(endpoints, dtype=np.bool_)
        self.variants = np.zeros(endpoints, dtype=np.int8)
        self.on = [0] * endpoints
        """Requests that each endpoint really has."""
        self.placed = self.beyond = self.most = 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self.pickers = [Picker(self, number + 1) for number in range(pickers)]

    def at(self, time_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    def began(self, slot: int) -> None:
        self.on[slot] += 1
        self.placed += 1
        self.beyond += self.on[slot] > self.limit
        self.most = max(self.most, self.on[slot])

    def run(self, arrivals: Iterator[float], seconds: float) -> None:
        for picker in self.pickers:
            self.at(self.rng.uniform(0, TICK_S), picker.tick)
        for time_s in arrivals:
            self.at(time_s, self.rng.choice(self.pickers).arrive)
        while self._events and self._events[0][0] < seconds:
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)


def arrivals(load: str, pool: Pool, seconds: float) -> Iterator[float]:
    places = pool.endpoints * pool.limit
    if load == "burst":
        yield from sorted(pool.rng.uniform(1.0, 1.01) for _ in range(4 * places))
        return
    rate = (1.2 if load == "full" else 0.95) * places / SERVICE_S
    now_s = pool.rng.expovariate(rate)
    while now_s < seconds:
        yield now_s
        now_s += pool.rng.expovariate(rate)


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    for load in ("burst", "full", "brim"):
        for lag_ms in (2.0, 15.0):
            for pickers in map(int, arguments.pickers.split(",")):
                pools = []
                for seed in range(arguments.seeds):
                    pool = Pool(
                        pickers=pickers,
                        endpoints=arguments.endpoints,
                        limit=arguments.limit,
                        lag_s=lag_ms / 1e3,
                        waits=load != "brim",
                        seed=seed,
                    )
                    pool.run(arrivals(load, pool, arguments.seconds), arguments.seconds)
                    pools.append(pool)
                beyond, most = sum(pool.beyond for pool in pools), max(pool.most for pool in pools)
                if pickers == 1 and beyond:
                    raise SystemExit("one picker went past the limit; no figure is given")
                yield {
                    "load": load,
                    "lag_ms": lag_ms,
                    "pickers": pickers,
                    "beyond": round(beyond / sum(pool.placed for pool in pools), 4),
                    "most": most,
                    "limit": arguments.limit,
                    "bound": pickers * arguments.limit,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pickers", default="1,2,4,8")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--endpoints", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="of virtual time")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    for row in rows(arguments):
        print(
            json.dumps(row) if arguments.json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True
        )


if __name__ == "__main__":
    main()
