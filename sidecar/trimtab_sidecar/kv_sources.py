"""Where an engine publishes its KV cache events: one source for each data-parallel rank behind its port.

The one rule: who binds is the engine's choice, and we do the opposite. vLLM and SGLang bind their PUB socket only where
its address holds `*` or `::` (or is ipc or inproc) and connect it otherwise, so that the consumer binds; the replay
socket is always theirs to bind. This module parses and derives addresses; it opens no socket.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

RANKS_MAX = 256
"""Data-parallel ranks behind one port; a larger claim is refused as nonsense."""
RANK_DIGITS_MAX = 6


class SourceError(ValueError):
    """What the engine or its flags say about event sources makes no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSource:
    """The event publisher of one rank."""

    rank: int
    events: str
    """ZMQ address to receive events at."""
    replay: str | None
    """ZMQ address to ask for past events at, None: there is none."""
    topic: str = ""
    binds_here: bool = False
    """The engine connects to `events`, so we bind it (unless somebody has: then the engine did resolve a wildcard)."""


def source_of_config(config: Mapping[str, object], rank: int, host: str) -> KvSource | None:
    """From an engine's KV events configuration, its addresses as rank `rank` uses them. None: no events over ZMQ."""
    publisher = config.get("publisher", "zmq" if config.get("enable_kv_cache_events") else "null")
    if publisher != "zmq" or config.get("enable_kv_cache_events") is False:
        return None
    endpoint, replay, topic = config.get("endpoint", "tcp://*:5557"), config.get("replay_endpoint"), config.get("topic")
    if not isinstance(endpoint, str) or not isinstance(replay, str | None):
        raise SourceError("KV event addresses are not text")
    return KvSource(
        rank=rank,
        events=reachable(endpoint, host),
        replay=None if not replay else reachable(replay, host),
        topic=topic if isinstance(topic, str) else "",
        binds_here=not engine_binds(endpoint),
    )


def discovered_sources(answer: object, host: str) -> tuple[KvSource, ...]:
    """The sources in an answer of `GET /kv_event_sources`, by rank. Empty: the engine publishes none."""
    if not isinstance(answer, dict) or len(answer) > RANKS_MAX:
        raise SourceError("the engine's list of KV event sources is no map of ranks")
    sources = []
    for rank, config in answer.items():
        if not isinstance(config, dict) or not str(rank).isdecimal() or len(str(rank)) > RANK_DIGITS_MAX:
            raise SourceError("the engine's list of KV event sources is no map of ranks")
        source = source_of_config(config, int(rank), host)
        if source is not None:
            sources.append(source)
    return tuple(sorted(sources, key=lambda source: source.rank))


def configured_sources(args: Sequence[str], host: str) -> tuple[KvSource, ...]:
    """The sources that an engine's own command line asks for (releases without `/kv_event_sources`, and SGLang)."""
    text = flag_value(args, "--kv-events-config")
    if text is None:
        return ()
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise SourceError("--kv-events-config is not JSON") from error
    if not isinstance(config, dict):
        raise SourceError("--kv-events-config is no JSON object")
    ranks = 1
    for flag in ("--data-parallel-size", "-dp", "--dp-size", "--dp"):
        value = flag_value(args, flag)
        if value is not None and value.isdecimal():
            ranks = int(value)
    source = source_of_config(config, 0, host)
    return () if source is None else of_ranks(source, ranks)


def of_ranks(first: KvSource, ranks: int) -> tuple[KvSource, ...]:
    """The sources of ranks 0 to `ranks - 1`, where `first` is rank 0's: rank r is at port + r, events and replay."""
    if not 1 <= ranks <= RANKS_MAX:
        raise SourceError(f"{ranks} data-parallel ranks")
    return tuple(
        replace(
            first,
            rank=rank,
            events=at_rank(first.events, rank),
            replay=None if first.replay is None else at_rank(first.replay, rank),
        )
        for rank in range(ranks)
    )


def at_rank(address: str, rank: int) -> str:
    if rank == 0:
        return address
    if address.startswith("inproc"):
        return f"{address}_dp{rank}"
    base, separator, port = address.rpartition(":")
    if not address.startswith("tcp://") or not separator or not port.isdecimal():
        raise SourceError(f"no address of rank {rank} can be derived from {address}")
    return f"{base}:{int(port) + rank}"


def engine_binds(address: str) -> bool:
    return "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))


def reachable(address: str, host: str) -> str:
    """`address` with a wildcard host replaced by `host`, the one that the engine's HTTP port is reached at."""
    if not address.startswith("tcp://"):
        return address
    base, separator, port = address.removeprefix("tcp://").rpartition(":")
    if not separator:
        raise SourceError(f"KV event address without a port: {address}")
    if base in ("*", "0.0.0.0", "[::]", "::"):
        base = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{base}:{port}"


def flag_value(args: Sequence[str], flag: str) -> str | None:
    """The value of the last `--flag value` or `--flag=value` in a command line."""
    found = None
    for index, arg in enumerate(args):
        if arg == flag and index + 1 < len(args):
            found = args[index + 1]
        elif arg.startswith(flag + "="):
            found = arg[len(flag) + 1 :]
    return found
