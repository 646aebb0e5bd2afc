"""A replica's voice: its reservations, batched into the load log, and its lease.

The one rule: a lease and the log always agree: the lease holds the open reservations after the last entry that went out
with it. A replica whose lease has expired is gone for the others, so it takes a new incarnation and tells everything
again.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from trimtab_core.chunks import U32, U64
from trimtab_core.extra_terms import ORDINARY_MILLI

from .backoff import Backoff
from .errors import StateUnavailable
from .generation import Generation
from .keys import PoolKeys
from .load_codec import Lease, LeaseHead, LoadEntry, LoadKind, LoadOperation, encode_lease, encode_load_entry
from .load_outbox import LoadOutbox
from .outage_log import OutageLog
from .pace import Pace
from .settings import StateSettings
from .store import Command, Store
from .stream_position import START, parse_id

log = logging.getLogger(__name__)

ENTRIES_PER_FLUSH_MAX = 64
"""Entries of the load log in one transaction."""
TURNS_AT_ONCE = 4
"""Operations that come alone, or a few of them, are told at once: the other replicas decide by them."""
BATCHES_TIMED = 8
"""The last ones, of which the shortest tells how far away the store is."""
OWN_INCARNATIONS_MAX = 64
"""Own incarnations remembered, so that a follower can leave out their entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReservation:
    """One open reservation as the lease tells it: `p_tokens` 0 and no samples once its first token was seen."""

    reservation_id: int
    endpoint: str
    p_tokens: int
    batch: int
    sample_hashes: U64
    sample_tokens: U32
    weight_milli: int = ORDINARY_MILLI


class ReadsBehind(Protocol):
    """Who reads on in the load log in the very transaction that writes to it."""

    def read_behind(self) -> Command: ...

    def take_behind(self, reply: Any) -> bool:
        """What the command found. Whether all of it is known now."""


class LoadPublisher:
    """All but `run` and `close` are synchronous and only enqueue: call them in the same step as the scheduler's change.

    `open_reservations` is called when the lease is written; it must reflect every operation enqueued so far, and none
    that is not. `on_lease_lost` is told after a new incarnation was taken.
    """

    def __init__(
        self,
        store: Store,
        keys: PoolKeys,
        *,
        open_reservations: Callable[[], Iterable[OpenReservation]],
        settings: StateSettings | None = None,
        incarnation: int | None = None,
        on_lease_lost: Callable[[], None] | None = None,
    ) -> None:
        self.connected = False
        """The store took the last batch."""
        self.leases_lost = 0
        self.reader: ReadsBehind | None = None
        """Set once by the composition root: the follower needs our incarnations itself."""
        self._store = store
        self._keys = keys
        self._open_reservations = open_reservations
        self._settings = settings or StateSettings()
        self._on_lease_lost = on_lease_lost
        self._outbox = LoadOutbox(_random_u64() if incarnation is None else incarnation, self._settings)
        self._took_s: deque[float] = deque(maxlen=BATCHES_TIMED)
        self._own: dict[int, None] = {self._outbox.incarnation: None}
        self._goodbyes: list[tuple[int, int]] = []
        self._generation = Generation(keys, self._settings)
        self._is_held = False
        self._renewal = 0
        self._renew_at_s = self._renewed_at_s = 0.0
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._last_id = START
        """Of the last entry of ours in the log."""
        self._asked: list[asyncio.Future[tuple[int, int] | None]] = []
        self._flushing = asyncio.Lock()
        self._pace = Pace(self._settings.load_window_s, TURNS_AT_ONCE)

    @property
    def incarnation(self) -> int:
        """The present one; it changes when the lease is lost."""
        return self._outbox.incarnation

    @property
    def own_incarnations(self) -> Container[int]:
        """All that this process has had, a live view: hand it to PoolFollower."""
        return self._own

    @property
    def round_trip_s(self) -> float:
        """To the store and back, where nothing is in the way."""
        return min(self._took_s, default=0.0)

    @property
    def dropped(self) -> int:
        """How often operations were dropped in favour of the lease, because the store was away for long."""
        return self._outbox.dropped

    def reserve(
        self,
        reservation_id: int,
        endpoint: str,
        p_tokens: int,
        batch: int,
        sample_hashes: U64,
        sample_tokens: U32,
        weight_milli: int = ORDINARY_MILLI,
    ) -> None:
        load = (p_tokens, batch, sample_hashes, sample_tokens, weight_milli)
        self._add(LoadOperation(LoadKind.RESERVE, reservation_id, endpoint, *load))

    def first_token(self, reservation_id: int) -> None:
        self._add(LoadOperation(LoadKind.FIRST_TOKEN, reservation_id))

    def moved(self, reservation_id: int, endpoint: str) -> None:
        self._add(LoadOperation(LoadKind.MOVED, reservation_id, endpoint))

    def finished(self, reservation_id: int) -> None:
        self._add(LoadOperation(LoadKind.FINISHED, reservation_id))

    def tell_now(self) -> "asyncio.Future[tuple[int, int] | None]":
        """Sends at once what waits. The place of our last entry in the log, when the reader has passed on all entries
        before it; None where that was not to be had. One round trip answers all who ask before it begins."""
        future = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._wake.set()
        self._urgent.set()
        return future

    async def run(self) -> None:
        """Sends and renews the lease until cancelled; never raises for a store that is away."""
        backoff = Backoff(self._settings.backoff_min_s, self._settings.backoff_max_s)
        outage = OutageLog("load operations wait")
        try:
            while True:
                await self._gather()
                try:
                    await self._flush()
                except StateUnavailable as error:
                    self.connected = False
                    outage.failed(error)
                    _answer(self._taken_questions(), None)
                    await self._store.pause(backoff.next_s())
                else:
                    backoff.reset()
                    outage.over()
        finally:
            self.connected = False
            _answer(self._taken_questions(), None)

    async def close(self) -> None:
        """Sends what is left, says goodbye and deletes the lease: peers drop this replica at once.

        Call it when `run` has ended. Raises StateUnavailable: the lease then goes by its time to live.
        """
        if self._outbox.has_work:
            await self._flush()
        outbox = self._outbox
        await self._store.batch(
            [
                self._xadd(_goodbye(outbox.incarnation, outbox.sequence + 1)),
                ("DEL", self._keys.replica(outbox.incarnation)),
                ("SREM", self._keys.replicas, _member(outbox.incarnation)),
            ],
            atomic=True,
        )

    def _add(self, operation: LoadOperation) -> None:
        if not self._outbox.add(operation):
            self._renew_at_s = 0.0
        self._wake.set()

    async def _gather(self) -> None:
        """Waits for operations and then, where they come thick, for more; or until the lease has to be renewed, or
        somebody waits for an answer."""
        loop = asyncio.get_running_loop()
        if not self._outbox.has_work and not self._asked:
            self._wake.clear()
            if not await _is_set_by(self._wake, self._renew_at_s):
                return
        if self._asked or loop.time() >= self._renew_at_s:
            return
        pause_s = self._pace.wait_s(loop.time())
        if pause_s:
            self._urgent.clear()
            await _is_set_by(self._urgent, loop.time() + pause_s)
        else:
            await asyncio.sleep(0)

    def _taken_questions(self) -> "list[asyncio.Future[tuple[int, int] | None]]":
        asked, self._asked = self._asked, []
        return asked

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._flushing:
            while True:
                asked, is_all_read = self._taken_questions(), False
                try:
                    is_all_read = await self._send(loop.time(), self.reader if asked else None)
                finally:
                    _answer(asked, self._last_id if is_all_read else None)
                if not self._outbox.has_work and not self._asked and loop.time() < self._renew_at_s:
                    return

    async def _send(self, now_s: float, reader: ReadsBehind | None) -> bool:
        """One transaction: entries, what the reader wants to know after them, and the lease if it is due and stands on
        all entries. Whether the reader knows all that is before the last entry, and nothing waits to be sent."""
        outbox, settings = self._outbox, self._settings
        if outbox.sequence == 0:
            outbox.greet()
        entries = outbox.entries(ENTRIES_PER_FLUSH_MAX)
        goodbyes = list(self._goodbyes)
        commands: list[Command] = []
        for incarnation, sequence in goodbyes:
            commands.append(self._xadd(_goodbye(incarnation, sequence)))
            commands.append(("SREM", self._keys.replicas, _member(incarnation)))
        commands += [self._xadd(entry) for entry in entries]
        read_at = len(commands)
        if reader is not None:
            commands.append(reader.read_behind())
        is_renewal = now_s >= self._renew_at_s and len(entries) < ENTRIES_PER_FLUSH_MAX
        if is_renewal:
            commands += self._lease_commands()
        began_s = asyncio.get_running_loop().time()
        replies = await self._store.batch(commands, atomic=True)
        if commands:
            self._took_s.append(asyncio.get_running_loop().time() - began_s)
        self.connected = True
        outbox.arrived(len(entries))
        if entries:
            self._last_id = parse_id(replies[read_at - 1])
        del self._goodbyes[: len(goodbyes)]
        if is_renewal:
            generation, lease = replies[-6], replies[-4]
            is_changed = self._generation.is_changed(generation if isinstance(generation, bytes) else None)
            if lease:
                self._is_held = True
                self._renewed_at_s = now_s
                self._renew_at_s = now_s + settings.lease_renew_s
            elif is_changed and now_s - self._renewed_at_s < settings.lease_s:
                log.warning("the store lost its contents: writing the lease again")
                self._is_held = False
            else:
                self._take_new_incarnation()
        if reader is None or not reader.take_behind(replies[read_at]):
            return False
        return outbox is self._outbox and len(entries) < ENTRIES_PER_FLUSH_MAX

    def _lease_commands(self) -> list[Command]:
        """The generation's three commands, then the lease; written only where it is, unless it was never there."""
        keys, settings, outbox = self._keys, self._settings, self._outbox
        self._renewal += 1
        reservations = [
            LoadOperation(
                LoadKind.RESERVE,
                r.reservation_id,
                r.endpoint,
                r.p_tokens,
                r.batch,
                r.sample_hashes,
                r.sample_tokens,
                r.weight_milli,
            )
            for r in islice(self._open_reservations(), settings.lease_reservations_max)
        ]
        head = LeaseHead(outbox.incarnation, outbox.sequence, self._renewal)
        data = encode_lease(Lease(head, reservations))
        lease: Command = ("SET", keys.replica(outbox.incarnation), data, "PX", _ms(settings.lease_s))
        return [
            *self._generation.commands(),
            (*lease, "XX") if self._is_held else lease,
            ("SADD", keys.replicas, _member(outbox.incarnation)),
            ("PEXPIRE", keys.replicas, _ms(settings.membership_ttl_s)),
            ("PEXPIRE", keys.load_log, _ms(settings.stream_ttl_s)),
        ]

    def _take_new_incarnation(self) -> None:
        """The lease has expired, in this store or in the one whose contents were lost: for the others this replica has
        ended, and they never take an ended incarnation back."""
        old = self._outbox
        self._goodbyes.append((old.incarnation, old.sequence + 1))
        self._outbox = LoadOutbox(_random_u64(), self._settings)
        self._own[self._outbox.incarnation] = None
        if len(self._own) > OWN_INCARNATIONS_MAX:
            del self._own[next(iter(self._own))]
        # Its first lease tells all open reservations, at position 0.
        self._is_held, self._renewal, self._renew_at_s = False, 0, 0.0
        self.leases_lost += 1
        log.warning("own lease had expired: incarnation %016x is now %016x", old.incarnation, self.incarnation)
        if self._on_lease_lost is not None:
            self._on_lease_lost()

    def _xadd(self, entry: bytes) -> Command:
        return ("XADD", self._keys.load_log, "MAXLEN", "~", self._settings.load_log_entries_max, "*", "b", entry)


async def _is_set_by(event: asyncio.Event, until_s: float) -> bool:
    try:
        async with asyncio.timeout_at(until_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _answer(asked: "list[asyncio.Future[tuple[int, int] | None]]", position: tuple[int, int] | None) -> None:
    for future in asked:
        if not future.done():
            future.set_result(position)


def _goodbye(incarnation: int, sequence: int) -> bytes:
    return encode_load_entry(LoadEntry(incarnation, sequence, [LoadOperation(LoadKind.GOODBYE, 0)]))


def _member(incarnation: int) -> str:
    return f"{incarnation:016x}"


def _random_u64() -> int:
    return int.from_bytes(os.urandom(8), "little")


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
