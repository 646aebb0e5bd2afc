"""The dashboard "Trimtab / Picker health": how fast the pickers of a pool decide, and how fresh what they know is.

The one rule: a picker is told from the others by Prometheus's own `instance`.
"""

from collections.abc import Sequence
from typing import Final

from trimtab_observability.dashboard import ONE, Page, quantile, rate
from trimtab_observability.panels import GREEN, ORANGE, RED, Limit, Panel, Query, lines, number

PICKER: Final = "{{instance}}"
OURS: Final = f"and on (instance) trimtab_ready{{{ONE}}}"
"""For the metrics that every process has, without a pool's labels."""
ENTRIES: Final = f'{ONE}, event=~"kv_entries|load_entries"'
TROUBLES: Final = f'{ONE}, event=~"resyncs|malformed|leases_lost|load_dropped"'


def _times(title: str, histogram: str, *, text: str, limits: Sequence[Limit] = ()) -> Panel:
    return lines(
        title,
        Query(quantile(0.5, histogram, ONE, by="instance"), f"p50 {PICKER}"),
        Query(quantile(0.99, histogram, ONE, by="instance"), f"p99 {PICKER}"),
        text=text,
        unit="s",
        is_log=True,
        limits=limits,
    )


def _gauge(title: str, metric: str, *, text: str, unit: str = "short", limits: Sequence[Limit] = ()) -> Panel:
    return lines(
        title,
        Query(f"max by (instance) ({metric}{{{ONE}}})", PICKER),
        text=text,
        unit=unit,
        limits=limits,
    )


NUMBERS: Final = (
    number(
        "Pickers ready",
        Query(f"sum(trimtab_ready{{{ONE}}})"),
        text="That answer Prometheus and know the pool.",
        base=RED,
        limits=[Limit(1, GREEN)],
    ),
    number(
        "Wanted",
        Query(f'max(trimtab_operator_pool_pickers{{{ONE}, state="wanted"}})'),
        text="By the policy or its autoscaler, as the operator sees the Deployment.",
    ),
    number(
        "Known to one another",
        Query(f"min(trimtab_replicas{{{ONE}}})"),
        text="Pickers that each knows of, itself included; the least. Lower than the pickers ready: they do not share"
        " their load.",
    ),
    number(
        "Without the store",
        Query(f"count(trimtab_state_connected{{{ONE}}} == 0) or vector(0)"),
        text="Pickers that route by what they knew before.",
        base=GREEN,
        limits=[Limit(1, RED)],
    ),
    number(
        "Decision p99",
        Query(quantile(0.99, "trimtab_decision_seconds", ONE)),
        text="From the complete request to the choice: reading, rendering and hashing included.",
        unit="s",
    ),
    number(
        "Scheduler p99",
        Query(quantile(0.99, "trimtab_scheduler_seconds", ONE)),
        text="Match, score and reserve.",
        unit="s",
        base=GREEN,
        limits=[Limit(0.0005, ORANGE), Limit(0.001, RED)],
    ),
    number(
        "Log lag",
        Query(f"max(trimtab_log_lag_seconds{{{ONE}}})"),
        text="How far the slowest picker is behind the logs of the shared state.",
        unit="s",
        base=GREEN,
        limits=[Limit(1, RED)],
    ),
    number(
        "Core",
        Query(f"count by (implementation) (trimtab_core{{{ONE}}} {OURS})", "{{implementation}}"),
        text="native or reference: the latter is the readable Python, and slow.",
        is_name=True,
    ),
)

LATENCY: Final = (
    _times(
        "Decision",
        "trimtab_decision_seconds",
        text="From the complete request to the choice. Prompts of hundreds of kilobytes take milliseconds to read.",
    ),
    _times(
        "Scheduler",
        "trimtab_scheduler_seconds",
        text="Match, score and reserve: what the choice itself takes, whatever the prompt's size.",
        limits=[Limit(0.001, RED)],
    ),
    _times("Hop", "trimtab_hop_seconds", text="From the last byte of the request to the answer, as it is sent."),
    _times(
        "Event loop's lag",
        "trimtab_event_loop_lag_seconds",
        text="How late the process's own timer is. Above some 20 ms it has more to do than it can.",
    ),
    lines(
        "CPU",
        Query(f"rate(process_cpu_seconds_total[$__rate_interval]) {OURS}", PICKER),
        text="Cores in use.",
    ),
    lines(
        "Memory",
        Query(f"process_resident_memory_bytes {OURS}", PICKER),
        text="Resident. The index takes some 16 bytes for each endpoint and chunk.",
        unit="bytes",
    ),
)

STATE: Final = (
    _gauge(
        "Log lag",
        "trimtab_log_lag_seconds",
        text="How far each picker is behind the logs of the shared state; grows while the store is away.",
        unit="s",
        limits=[Limit(1, RED)],
    ),
    lines(
        "Connected to the store",
        Query(f"min(trimtab_state_connected{{{ONE}}})", "all pickers"),
        Query(f"min(trimtab_sidecar_state_connected{{{ONE}}})", "all sidecars"),
        Query(f"min(trimtab_operator_pool_store_connected{{{ONE}}})", "operator"),
        text="1: all of them. Routing goes on without, by what is known.",
        most=1.0,
    ),
    lines(
        "Entries read",
        Query(f"sum by (event) ({rate('trimtab_state_events_total', ENTRIES)})", "{{event}}"),
        text="Of the KV log and the load log, by all pickers.",
        unit="short",
    ),
    lines(
        "Troubles with the shared state",
        Query(f"sum by (event) (increase(trimtab_state_events_total{{{TROUBLES}}}[$__rate_interval]))", "{{event}}"),
        text="resyncs: all was read anew; leases_lost: a picker was silent for 10 s and others took its load as gone.",
    ),
    _gauge(
        "Endpoints that wait for a snapshot",
        "trimtab_unsynced_endpoints",
        text="Their chunks may be wrong until it comes: seconds.",
    ),
    lines(
        "Index",
        Query(f"max by (instance) (trimtab_index_pairs{{{ONE}}})", f"pairs {PICKER}"),
        Query(f"max by (instance) (trimtab_index_chunks{{{ONE}}})", f"chunks {PICKER}"),
        text="Pairs of an endpoint and a chunk that it holds, and distinct chunks. Alike on all pickers.",
    ),
)

RESERVATIONS: Final = (
    _gauge(
        "Exchanges in flight",
        "trimtab_exchanges_in_flight",
        text="HTTP requests that a picker holds a stream of.",
    ),
    lines(
        "Open reservations",
        Query(f"max by (instance) (trimtab_open_reservations{{{ONE}}})", PICKER),
        Query(
            f"max by (instance) (trimtab_open_reservations{{{ONE}}} - trimtab_exchanges_in_flight{{{ONE}}})",
            f"beyond the exchanges {PICKER}",
        ),
        text="Each belongs to an exchange, so never more than those.",
    ),
    _gauge(
        "Oldest reservation",
        "trimtab_oldest_reservation_seconds",
        text="As old as the longest response that is being streamed.",
        unit="s",
    ),
    lines(
        "Requests by picker",
        Query(f"sum by (instance) ({rate('trimtab_decisions_total', ONE)})", PICKER),
        text="The gateway spreads them over all.",
        unit="reqps",
        is_stacked=True,
    ),
    lines(
        "Ended without a choice",
        Query(f"sum by (instance) ({rate('trimtab_not_ready_total', ONE)})", f"not ready {PICKER}"),
        Query(f"sum by (instance) ({rate('trimtab_failures_total', ONE)})", f"failed {PICKER}"),
        Query(f"sum by (instance) ({rate('trimtab_protocol_errors_total', ONE)})", f"protocol {PICKER}"),
        text="The gateway's failure mode decided. Should be zero.",
        unit="reqps",
    ),
    lines(
        "Sidecars: from the engine's step to the store",
        Query(f"max by (model_server) (trimtab_sidecar_publish_lag_seconds{{{ONE}}})", "{{model_server}}"),
        text="Of the last engine step with changes.",
        unit="s",
    ),
)

PAGE: Final = Page(
    name="pickers",
    title="Trimtab / Picker health",
    text="How fast the pickers of a pool decide, and how fresh what they know is.",
    is_of_one_pool=True,
    rows=(
        ("", NUMBERS),
        ("Latency", LATENCY),
        ("Shared state", STATE),
        ("Requests and reservations", RESERVATIONS),
    ),
)
