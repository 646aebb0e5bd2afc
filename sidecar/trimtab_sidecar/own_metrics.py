"""The sidecar's own metrics, in Prometheus form, read from its parts when asked.

The one rule: nothing is counted twice. The parts keep plain counts for their own use, and this collector only names
them; labels are the pool and the endpoint (`model_server`), never anything a client chooses.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab_core.selection import CORE_NAME
from trimtab_sidecar.endpoint_sidecar import EndpointSidecar
from trimtab_sidecar.engine_sidecar import EngineSidecar

LABELS = ("pool", "pool_namespace", "model_server")
PREFIX = "trimtab_sidecar_"


class SidecarCollector(Collector):
    """Collects over the engines of one process. `engines`: None while the pool's Secret is waited for."""

    def __init__(self, engines: Callable[[], Sequence[EngineSidecar] | None], *, pool: str, namespace: str) -> None:
        self._engines = engines
        self._pool = (pool, namespace)

    def collect(self) -> Iterator[Metric]:
        known = self._engines()
        engines = known or ()
        endpoints = [(engine, endpoint) for engine in engines for endpoint in engine.endpoints]
        rows = [((*self._pool, endpoint.endpoint), readings(engine, endpoint)) for engine, endpoint in endpoints]
        for name, (kind, text) in FAMILIES.items():
            family = kind(PREFIX + name, text, labels=LABELS)
            for labels, values in rows:
                if name in values:
                    family.add_metric(labels, values[name])
            yield family
        scrapes = CounterMetricFamily(PREFIX + "scrapes", "Looks at an engine.", labels=LABELS)
        errors = CounterMetricFamily(PREFIX + "scrape_errors", "Looks that failed.", labels=LABELS)
        for engine in engines:
            scrapes.add_metric((*self._pool, engine.address), engine.scrapes)
            errors.add_metric((*self._pool, engine.address), engine.scrape_errors)
        yield scrapes
        yield errors
        text = "1 while the pool's Secret is waited for: nothing is told of the engine."
        waiting = GaugeMetricFamily(PREFIX + "waits_for_secret", text, labels=LABELS[:2])
        waiting.add_metric(self._pool, known is None)
        yield waiting
        labels = ("pool", "pool_namespace", "implementation")
        core = GaugeMetricFamily("trimtab_core", "The core in use.", labels=labels)
        core.add_metric((*self._pool, CORE_NAME), 1)
        yield core


FAMILIES: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str]] = {
    "blocks": (GaugeMetricFamily, "Engine blocks that are known to be held."),
    "unconfirmed_blocks": (GaugeMetricFamily, "Blocks known from before a gap and not seen since."),
    "chunks": (GaugeMetricFamily, "Chunks published."),
    "engine_up": (GaugeMetricFamily, "1 if the engine answers."),
    "is_current": (GaugeMetricFamily, "1 if no event is known to be missing."),
    "is_approximate": (GaugeMetricFamily, "1 if the endpoint's hits cannot be told exactly."),
    "state_connected": (GaugeMetricFamily, "1 if the store took the last batch."),
    "requests_running": (GaugeMetricFamily, "Requests that the engine runs."),
    "requests_waiting": (GaugeMetricFamily, "Requests that wait in the engine."),
    "kv_usage": (GaugeMetricFamily, "Share of the engine's KV cache that requests hold."),
    "publish_lag_seconds": (GaugeMetricFamily, "From the last engine step with changes to handing them on."),
    "frames": (CounterMetricFamily, "Event frames received, published or replayed."),
    "stored_blocks": (CounterMetricFamily, "Blocks in Stored events."),
    "removed_blocks": (CounterMetricFamily, "Blocks in Removed events."),
    "cache_clears": (CounterMetricFamily, "Times that the engine cleared its cache."),
    "unknown_parents": (CounterMetricFamily, "Blocks dropped because the block before them is not known."),
    "unknown_tokens": (CounterMetricFamily, "Blocks dropped because a token's bytes are not known."),
    "refused_blocks": (CounterMetricFamily, "Blocks left out because their identity is not understood."),
    "other_group_events": (CounterMetricFamily, "Events of KV cache groups that no chain is built from."),
    "gaps": (CounterMetricFamily, "Times that the sequence of events did not follow."),
    "gaps_lost": (CounterMetricFamily, "Gaps that no replay could fill; the chunks were unpublished."),
    "replays": (CounterMetricFamily, "Replays asked for."),
    "epoch_changes": (CounterMetricFamily, "Engine processes found to be new."),
    "decode_errors": (CounterMetricFamily, "Frames and events that could not be read."),
    "unknown_events": (CounterMetricFamily, "Events of an unknown type."),
    "chunks_published": (CounterMetricFamily, "Chunks handed on as added."),
    "chunks_withdrawn": (CounterMetricFamily, "Chunks handed on as removed."),
    "checkpoints": (CounterMetricFamily, "Checkpoints written."),
    "checkpoint_errors": (CounterMetricFamily, "Checkpoints not written, or refused."),
    "cache_query_tokens": (CounterMetricFamily, "Tokens that the engine looked up in its prefix cache."),
    "cache_hit_tokens": (CounterMetricFamily, "Tokens that it found there."),
    "block_bytes_seen": (CounterMetricFamily, "Bytes of text in the blocks seen."),
    "block_tokens_seen": (CounterMetricFamily, "Tokens in the blocks seen."),
}


def readings(engine: EngineSidecar, endpoint: EndpointSidecar) -> dict[str, float]:
    """Values by family. Families that do not apply to the endpoint are left out."""
    counts, rank = endpoint.counts, engine.metrics.rank(endpoint.rank)
    values: dict[str, float] = {
        "engine_up": engine.is_reachable,
        "is_approximate": engine.approximate(endpoint) is not None,
        "state_connected": endpoint.publisher.connected,
        "requests_running": rank.running,
        "requests_waiting": rank.waiting,
        "kv_usage": rank.kv_usage,
        "epoch_changes": counts.epochs,
        "cache_query_tokens": rank.cache_query_tokens_total,
        "cache_hit_tokens": rank.cache_hit_tokens_total,
        "checkpoints": counts.checkpoints,
        "checkpoint_errors": counts.checkpoint_errors,
    }
    if endpoint.feed is not None and endpoint.prefixes is not None:
        feed, prefixes, chains = endpoint.feed, endpoint.prefixes, endpoint.prefixes.chains
        events = prefixes.counts
        values |= {
            "blocks": chains.block_count,
            "unconfirmed_blocks": chains.unconfirmed_count,
            "chunks": chains.chunk_count,
            "is_current": feed.is_current,
            "publish_lag_seconds": endpoint.event_lag_s,
            "frames": feed.frames,
            "stored_blocks": events.stored_blocks,
            "removed_blocks": events.removed_blocks,
            "cache_clears": events.clears,
            "unknown_parents": chains.dropped_unknown_parent,
            "unknown_tokens": chains.dropped_unknown_token,
            "refused_blocks": events.refused_blocks + chains.dropped_malformed + chains.dropped_full,
            "other_group_events": events.other_group_events,
            "gaps": feed.gaps,
            "gaps_lost": counts.gaps_lost,
            "replays": feed.replays,
            "decode_errors": counts.payload_errors + events.undecodable + feed.malformed,
            "unknown_events": events.unknown,
            "chunks_published": counts.chunks_published,
            "chunks_withdrawn": counts.chunks_withdrawn,
            "block_bytes_seen": chains.bytes_seen,
            "block_tokens_seen": chains.tokens_seen,
        }
    return values
