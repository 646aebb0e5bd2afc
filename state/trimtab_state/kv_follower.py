"""Follows the chunks of all endpoints through the KV log: positions, gaps, snapshots. No I/O, no clock.

The one rule: changes are passed on only in the writer's own order without a gap; after a gap an endpoint is unsynced
until a snapshot or a clear says its whole state. So the sink ends with exactly the writer's chunks whatever was missed.

Each endpoint has one current writer incarnation. Entries of another one do not switch it, since the log also holds old
ones; the snapshot in the store does, because every writer stores one before its first entry.
"""

from dataclasses import dataclass, field
from typing import Protocol

from trimtab_core.chunks import U32, U64

from .entry_tail import EntryTail
from .kv_codec import KvEntry, KvSnapshot
from .settings import StateSettings

OTHER_WRITERS_MAX = 4
"""Incarnations besides the current one whose entries are kept, and as many that are known to be past."""


class KvSink(Protocol):
    """See `sink.PoolSink`."""

    def on_kv_changes(self, endpoint: str, added: U64, tokens: U32, removed: U64) -> None: ...
    def on_kv_replace(self, endpoint: str, hashes: U64, tokens: U32) -> None: ...
    def on_kv_clear(self, endpoint: str) -> None: ...
    def on_kv_unsynced(self, endpoint: str) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Endpoint:
    """`incarnation` None: nothing known yet."""

    incarnation: int | None = None
    position: int = 0
    epoch: str = ""
    is_synced: bool = False
    tails: dict[int, EntryTail[KvEntry]] = field(default_factory=dict)
    past: list[int] = field(default_factory=list)
    announced: tuple[int, int] | None = None
    """Position in a heartbeat that is not ours yet; still not at the next one: something was missed."""
    required: tuple[int, int] | None = None
    """What was missed: the next snapshot has to come from this incarnation and cover this position."""


class KvFollower:
    """`wanted` names the endpoints whose snapshot has to be read; give what was read to `snapshot`."""

    def __init__(self, sink: KvSink, settings: StateSettings) -> None:
        self.wanted: set[str] = set()
        self.gaps = 0
        """How often an endpoint lost its place."""
        self.refused = 0
        """Entries of endpoints beyond the bound on endpoints."""
        self._sink = sink
        self._settings = settings
        self._endpoints: dict[str, _Endpoint] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of which anything is kept."""
        return tuple(self._endpoints)

    def entry(self, entry: KvEntry) -> None:
        """One entry of the log, in the log's order."""
        state = self._state(entry.endpoint)
        if state is None or entry.incarnation in state.past:
            return
        if entry.incarnation != state.incarnation:
            self._keep(entry, state)
            self.wanted.add(entry.endpoint)
        elif entry.sequence > state.position:
            if (state.is_synced and entry.sequence == state.position + 1) or entry.cleared:
                self._apply(entry, state)
            else:
                self._lose(entry.endpoint, state)
                self._keep(entry, state)

    def snapshot(self, endpoint: str, snapshot: KvSnapshot | None) -> bool:
        """What the store holds, read after the endpoint was wanted. False: not enough, its writer has to be asked."""
        state = self._state(endpoint)
        if state is None:
            self.wanted.discard(endpoint)
            return True
        if snapshot is None:
            return False
        tail = state.tails.get(snapshot.incarnation)
        if tail is not None and snapshot.sequence < tail.needs:
            return False
        if state.required is not None and not _covers(snapshot, state.required):
            return False
        if snapshot.incarnation == state.incarnation:
            if snapshot.sequence < state.position and not state.is_synced:
                return False
            if state.is_synced:
                # Read for entries of another incarnation: the store says that the current one is the newest.
                self._settle(endpoint, state)
                return True
        elif state.incarnation is not None:
            state.past.append(state.incarnation)
        state.incarnation, state.position, state.epoch = snapshot.incarnation, snapshot.sequence, snapshot.epoch
        state.is_synced = True
        self._sink.on_kv_replace(endpoint, snapshot.hashes, snapshot.tokens)
        following = tail.take_after(snapshot.sequence) if tail is not None else []
        self._settle(endpoint, state)
        for entry in following:
            self._apply(entry, state)
        return True

    def announced(self, endpoint: str, incarnation: int, sequence: int, *, caught_up: bool) -> None:
        """The writer's position as its heartbeat says. `caught_up`: the log was read to its end since the last one."""
        state = self._state(endpoint)
        if state is None:
            return
        if state.incarnation is None:
            self.wanted.add(endpoint)
        elif incarnation == state.incarnation and (sequence <= state.position or not state.is_synced):
            state.announced = state.required = None
        elif caught_up and state.announced is not None and state.announced[0] == incarnation:
            if incarnation != state.incarnation or state.announced[1] > state.position:
                state.required = state.announced
                self._lose(endpoint, state)
            state.announced = incarnation, sequence
        elif state.announced is None or state.announced[0] != incarnation:
            state.announced = incarnation, sequence

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone: unsynced, and nothing is kept."""
        state = self._endpoints.pop(endpoint, None)
        self.wanted.discard(endpoint)
        if state is not None and state.is_synced:
            self._sink.on_kv_unsynced(endpoint)

    def is_synced(self, endpoint: str) -> bool:
        state = self._endpoints.get(endpoint)
        return state is not None and state.is_synced

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        for name, state in self._endpoints.items():
            assert state.is_synced or name in self.wanted or state.incarnation is None, name
            assert len(state.tails) <= OTHER_WRITERS_MAX + 1, name
            assert len(state.past) <= OTHER_WRITERS_MAX, name
            assert state.incarnation not in state.past, name
            assert not state.is_synced or state.incarnation not in state.tails, name

    def _state(self, endpoint: str) -> _Endpoint | None:
        state = self._endpoints.get(endpoint)
        if state is None:
            if len(self._endpoints) >= self._settings.endpoints_max:
                self.refused += 1
                return None
            state = self._endpoints[endpoint] = _Endpoint()
        return state

    def _apply(self, entry: KvEntry, state: _Endpoint) -> None:
        is_fresh = entry.cleared or entry.epoch != state.epoch
        state.position, state.epoch = entry.sequence, entry.epoch
        if is_fresh:
            self._sink.on_kv_clear(entry.endpoint)
            if not state.is_synced:
                state.is_synced = True
                if set(state.tails) <= {entry.incarnation}:
                    self.wanted.discard(entry.endpoint)
                state.tails.pop(entry.incarnation, None)
        if len(entry.added) or len(entry.removed):
            self._sink.on_kv_changes(entry.endpoint, entry.added, entry.tokens, entry.removed)

    def _lose(self, endpoint: str, state: _Endpoint) -> None:
        self.wanted.add(endpoint)
        if state.is_synced:
            state.is_synced = False
            self.gaps += 1
            self._sink.on_kv_unsynced(endpoint)

    def _keep(self, entry: KvEntry, state: _Endpoint) -> None:
        tail = state.tails.get(entry.incarnation)
        if tail is None:
            others = [incarnation for incarnation in state.tails if incarnation != state.incarnation]
            if len(others) >= OTHER_WRITERS_MAX:
                del state.tails[others[0]]
            tail = EntryTail(self._settings.kv_buffer_entries_max, self._settings.kv_buffer_chunks_max)
            state.tails[entry.incarnation] = tail
        tail.add(entry, len(entry.added) + len(entry.removed))

    def _settle(self, endpoint: str, state: _Endpoint) -> None:
        """The current incarnation is the store's newest: all others are past."""
        state.past = [i for i in (*state.past, *state.tails) if i != state.incarnation][-OTHER_WRITERS_MAX:]
        state.tails.clear()
        state.announced = state.required = None
        self.wanted.discard(endpoint)


def _covers(snapshot: KvSnapshot, position: tuple[int, int]) -> bool:
    return snapshot.incarnation == position[0] and snapshot.sequence >= position[1]
