"""What the shared state says about a pool's engines and pickers: read for the status that people see.

The one rule: it only looks. Nothing that it finds changes how the pool is placed, and a store that is away is an answer
like any other. No prompt, no key and no login is in a report.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trimtab_state import CodecError, Heartbeat, PoolKeys, StateUnavailable, Store
from trimtab_state.documents import decode_heartbeat

READ_KEYS_MAX: Final = 256
"""Keys in one command: bounds the time for which a large pool holds the store."""
ENDPOINTS_MAX: Final = 8_192
"""Endpoints of a pool that are looked at; of more, the rest counts as silent."""
REPLICAS_MAX: Final = 1_024
CARDS_MAX: Final = 64
"""Model cards looked for; of more, the rest is taken as there."""
REASONS_MAX: Final = 8
"""Distinct reasons kept; the rest is counted under OTHER_REASONS."""
REASON_CHARS_MAX: Final = 200
OTHER_REASONS: Final = "other reasons"
OTHER_SECRET: Final = "another secret's hashes"
"""Reason of an endpoint whose sidecar has another secret than the pool: its hashes are never those of a prompt."""
PORTS_MAX: Final = 3
STRANGERS_MAX: Final = 1_024
"""Endpoints that are no members, and may be silent members' by another port, that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """Numbers of a pool's member endpoints, each in exactly one of the first seven."""

    exact: int = 0
    """Serving, with hits told exactly."""
    approximate: Mapping[str, int] = field(default_factory=dict)
    """Serving, with hits guessed: number by reason, most frequent first."""
    loading: int = 0
    """Serving, but its model card is not in the store."""
    draining: int = 0
    asleep: int = 0
    unreachable: int = 0
    """Its sidecar cannot reach the engine."""
    silent: tuple[str, ...] = ()
    """Names of members without a heartbeat: no sidecar, or none that reaches the store."""
    elsewhere: Mapping[int, int] = field(default_factory=dict)
    """Sidecars heard at a silent member's address, but of another port: number by port, most frequent first."""
    pickers: int = 0
    """Pickers that hold a lease."""
    store_error: str = ""
    """Why the store could not be read; all else is empty then."""

    @property
    def beating(self) -> int:
        """Endpoints whose sidecar is heard."""
        return self.serving + self.draining + self.asleep + self.unreachable

    @property
    def serving(self) -> int:
        """Endpoints whose sidecar says that the engine serves."""
        return self.exact + self.guessed

    @property
    def guessed(self) -> int:
        """Serving endpoints in approximate mode, for whatever reason."""
        return self.loading + sum(self.approximate.values())


def aggregate(
    members: Sequence[str],
    heartbeats: Iterable[Heartbeat],
    *,
    missing_cards: Iterable[str] = (),
    pickers: int = 0,
    seed_digest: str = "",
    strangers: Iterable[str] = (),
) -> FleetReport:
    """Pure. `members`: endpoint names of the control document; heartbeats of others are nobody's business.

    `seed_digest`: of the pool's hashes, empty where it is not known. `strangers`: others that are heard.
    """
    beats = {heartbeat.endpoint: heartbeat for heartbeat in heartbeats}
    missing = set(missing_cards)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    silent = []
    for name in dict.fromkeys(members):
        beat = beats.get(name)
        if beat is None:
            silent.append(name)
        elif beat.state != "serving":
            counts[beat.state] += 1
        elif seed_digest and beat.seed_digest not in ("", seed_digest):
            reasons[OTHER_SECRET] += 1
        elif beat.approximate is not None:
            reasons[beat.approximate[:REASON_CHARS_MAX] or "no reason given"] += 1
        elif (digest := _card(beat)) is None or digest in missing:
            counts["loading"] += 1
        else:
            counts["exact"] += 1
    return FleetReport(
        exact=counts["exact"],
        approximate=_most_frequent(reasons),
        loading=counts["loading"],
        draining=counts["draining"],
        asleep=counts["asleep"],
        unreachable=counts["unreachable"],
        silent=tuple(silent),
        elsewhere=_elsewhere(silent, strangers),
        pickers=pickers,
    )


async def read_fleet(store: Store, keys: PoolKeys, members: Sequence[str], *, seed_digest: str = "") -> FleetReport:
    """Never raises for a store that is away: the report says so."""
    try:
        heartbeats = await _heartbeats(store, keys, list(dict.fromkeys(members))[:ENDPOINTS_MAX])
        digests = sorted({digest for beat in heartbeats if (digest := _card(beat)) is not None})[:CARDS_MAX]
        are_there = await store.batch([("EXISTS", keys.card(digest)) for digest in digests])
        pickers = await _pickers(store, keys)
        strangers = await _strangers(store, keys, members) if len(heartbeats) < len(set(members)) else []
    except StateUnavailable as error:
        return FleetReport(store_error=str(error))
    missing = [digest for digest, is_there in zip(digests, are_there, strict=True) if not is_there]
    return aggregate(
        members,
        heartbeats,
        missing_cards=missing,
        pickers=pickers,
        seed_digest=seed_digest,
        strangers=strangers,
    )


async def _heartbeats(store: Store, keys: PoolKeys, members: Sequence[str]) -> list[Heartbeat]:
    found: list[Heartbeat] = []
    for start in range(0, len(members), READ_KEYS_MAX):
        names = members[start : start + READ_KEYS_MAX]
        for data in await store.execute("MGET", *(keys.heartbeat(name) for name in names)):
            try:
                found.extend([] if data is None else [decode_heartbeat(data)])
            except CodecError:
                continue  # A sidecar that nobody understands is not heard; pickers count it.
    return found


async def _strangers(store: Store, keys: PoolKeys, members: Sequence[str]) -> list[str]:
    """Endpoints that are heard, are no members, and lie at a member's address."""
    hosts = {_host_and_port(name)[0] for name in members}
    replies: list[Any] = await store.batch([("SMEMBERS", keys.endpoints)], skips_other_types=True)
    named = {entry.decode("utf-8", "replace") for entry in replies[0] or ()} - set(members)
    found = [name for name in sorted(named) if _host_and_port(name)[0] in hosts]
    return [beat.endpoint for beat in await _heartbeats(store, keys, found[:STRANGERS_MAX])]


async def _pickers(store: Store, keys: PoolKeys) -> int:
    replies: list[Any] = await store.batch([("SMEMBERS", keys.replicas)], skips_other_types=True)
    incarnations = []
    for member in sorted(replies[0] or ())[:REPLICAS_MAX]:
        try:
            incarnations.append(int(member, 16))
        except ValueError:
            continue
    # Not MGET: a lease holds all open reservations.
    return sum(await store.batch([("EXISTS", keys.replica(incarnation)) for incarnation in incarnations]))


def _elsewhere(silent: Iterable[str], strangers: Iterable[str]) -> dict[int, int]:
    hosts = {_host_and_port(name)[0] for name in silent}
    places = [_host_and_port(name) for name in strangers]
    return dict(Counter(port for host, port in places if host in hosts and port).most_common(PORTS_MAX))


def _host_and_port(endpoint: str) -> tuple[str, int]:
    """Of `ip:port` or `ip:port/rank`; port 0: it has none."""
    host, _, port = endpoint.partition("/")[0].rpartition(":")
    return host, int(port) if port.isdecimal() else 0


def _card(beat: Heartbeat) -> str | None:
    """Digest of the base model's card, or of any that there is."""
    cards = sorted((model.lora, model.card) for model in beat.models.values() if model.card is not None)
    return cards[0][1] if cards else None


def _most_frequent(reasons: Counter[str]) -> dict[str, int]:
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    kept = dict(ordered[:REASONS_MAX])
    if rest := sum(count for _, count in ordered[REASONS_MAX:]):
        kept[OTHER_REASONS] = kept.get(OTHER_REASONS, 0) + rest
    return kept
