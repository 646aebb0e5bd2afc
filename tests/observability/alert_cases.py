"""Each alert's two worlds: series under which it fires, and series under which it must not.

Series are written as promtool has them, a value each minute: `0x30` is thirty-one zeros, `0+600x30` grows by 600.
"""

from dataclasses import dataclass, field

POOL = 'pool_namespace="models", pool="chat"'
IDENTITY = {"pool_namespace": "models", "pool": "chat"}
LONG = 100
"""Minutes of each series."""


def gauge(name: str, value: float, labels: str = POOL) -> tuple[str, str]:
    """A series that keeps its value."""
    return f"{name}{{{labels}}}", f"{value:g}x{LONG}"


def counter(name: str, per_minute: float, labels: str = POOL) -> tuple[str, str]:
    """A series that grows."""
    return f"{name}{{{labels}}}", f"0+{per_minute}x{LONG}"


def endpoints(name: str, *values: float, more: str = "") -> list[tuple[str, str]]:
    """A gauge of each endpoint."""
    return [gauge(name, value, f'{POOL}, model_server="10.0.0.{n}:8000"{more}') for n, value in enumerate(values, 1)]


def pickers(name: str, *values: float) -> list[tuple[str, str]]:
    """A gauge of each picker."""
    return [gauge(name, value, f'{POOL}, instance="picker-{n}"') for n, value in enumerate(values, 1)]


def latency(name: str, bound: str, per_minute: float, below: float) -> list[tuple[str, str]]:
    """A histogram of one picker: so many observations a minute, so many of them at most the bound."""
    instance = f'{POOL}, instance="picker-1"'
    return [
        counter(f"{name}_bucket", below, f'{instance}, le="{bound}"'),
        counter(f"{name}_count", per_minute, instance),
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`labels` and `summary`: of the one alert that fires at `at_minutes`."""

    alert: str
    fires: list[tuple[str, str]]
    quiet: list[tuple[str, str]]
    summary: str
    severity: str
    labels: dict[str, str] = field(default_factory=lambda: dict(IDENTITY))
    at_minutes: int = 45


INSTANCE = {**IDENTITY, "instance": "picker-1"}
DAY = 1440 * 60
EXPIRY = "trimtab_operator_webhook_certificate_expiry_timestamp_seconds"

CASES = (
    Case(
        alert="TrimtabNoEndpoints",
        fires=[*endpoints("trimtab_endpoint_candidate", 0, 0), *pickers("trimtab_ready", 1)],
        quiet=[*endpoints("trimtab_endpoint_candidate", 0, 1), *pickers("trimtab_ready", 1)],
        summary="Pool models/chat has no endpoint that may be chosen; requests get 503.",
        severity="critical",
    ),
    Case(
        alert="TrimtabNoEndpoints",
        fires=pickers("trimtab_ready", 1, 1),
        quiet=pickers("trimtab_ready", 0, 0),
        summary="Pool models/chat has no endpoint that may be chosen; requests get 503.",
        severity="critical",
    ),
    Case(
        alert="TrimtabRequestsRefused",
        fires=[
            counter("trimtab_rejected_total", 100, f'{POOL}, reason="endpoints_full"'),
            counter("trimtab_decisions_total", 300, f'{POOL}, reason="product"'),
        ],
        quiet=[
            counter("trimtab_rejected_total", 1, f'{POOL}, reason="endpoints_full"'),
            counter("trimtab_decisions_total", 300, f'{POOL}, reason="product"'),
        ],
        summary="Pool models/chat refuses 25% of its requests.",
        severity="warning",
    ),
    Case(
        alert="TrimtabRequestsRefused",
        fires=[
            counter("trimtab_rejected_total", 10, f'{POOL}, reason="no_endpoints"'),
            *pickers("trimtab_ready", 1),
        ],
        quiet=[gauge("trimtab_rejected_total", 0, f'{POOL}, reason="no_endpoints"'), *pickers("trimtab_ready", 1)],
        summary="Pool models/chat refuses 100% of its requests.",
        severity="warning",
    ),
    Case(
        alert="TrimtabPickerFailures",
        fires=[counter("trimtab_failures_total", 1), gauge("trimtab_protocol_errors_total", 0)],
        quiet=[gauge("trimtab_failures_total", 7), gauge("trimtab_protocol_errors_total", 3)],
        summary="Pickers of models/chat ended 10 streams without a choice in ten minutes.",
        severity="warning",
    ),
    Case(
        alert="TrimtabNoPickers",
        fires=[
            gauge("trimtab_operator_pool_pickers", 0, f'{POOL}, state="ready"'),
            gauge("trimtab_operator_pool_pickers", 2, f'{POOL}, state="wanted"'),
        ],
        quiet=[
            gauge("trimtab_operator_pool_pickers", 0, f'{POOL}, state="ready"'),
            gauge("trimtab_operator_pool_pickers", 0, f'{POOL}, state="wanted"'),
        ],
        summary="Pool models/chat has no picker that is ready; the gateway goes on without, or fails.",
        severity="critical",
    ),
    Case(
        alert="TrimtabPickersMissing",
        fires=[
            gauge("trimtab_operator_pool_pickers", 1, f'{POOL}, state="ready"'),
            gauge("trimtab_operator_pool_pickers", 3, f'{POOL}, state="wanted"'),
        ],
        quiet=[
            gauge("trimtab_operator_pool_pickers", 3, f'{POOL}, state="ready"'),
            gauge("trimtab_operator_pool_pickers", 3, f'{POOL}, state="wanted"'),
        ],
        summary="Pool models/chat lacks 2 of its pickers.",
        severity="warning",
    ),
    Case(
        alert="TrimtabPickerNotReady",
        fires=pickers("trimtab_ready", 0, 1),
        quiet=pickers("trimtab_ready", 1, 1),
        summary="Picker picker-1 of models/chat runs but does not know its pool.",
        severity="warning",
        labels=INSTANCE,
    ),
    Case(
        alert="TrimtabSchedulerSlow",
        fires=latency("trimtab_scheduler_seconds", "0.001", 1000, 900),
        quiet=latency("trimtab_scheduler_seconds", "0.001", 1000, 999),
        summary="Picker picker-1 of models/chat decides only 90% of its requests within 1 ms.",
        severity="warning",
        labels=INSTANCE,
    ),
    Case(
        alert="TrimtabSchedulerSlow",
        # The first one after a pause may take long; twenty requests in five minutes say nothing of 1 %.
        fires=latency("trimtab_scheduler_seconds", "0.001", 30, 27),
        quiet=latency("trimtab_scheduler_seconds", "0.001", 4, 3),
        summary="Picker picker-1 of models/chat decides only 90% of its requests within 1 ms.",
        severity="warning",
        labels=INSTANCE,
    ),
    Case(
        alert="TrimtabPickerOverloaded",
        fires=latency("trimtab_event_loop_lag_seconds", "0.05", 3000, 2000),
        quiet=latency("trimtab_event_loop_lag_seconds", "0.05", 3000, 3000),
        summary="Picker picker-1 of models/chat has more to do than it can.",
        severity="warning",
        labels=INSTANCE,
    ),
    Case(
        alert="TrimtabReservationsLeak",
        fires=[*pickers("trimtab_open_reservations", 12, 3), *pickers("trimtab_exchanges_in_flight", 5, 3)],
        quiet=[*pickers("trimtab_open_reservations", 12, 3), *pickers("trimtab_exchanges_in_flight", 12, 4)],
        summary="Pool models/chat counts 7 requests that are not there.",
        severity="warning",
    ),
    Case(
        alert="TrimtabReservationsLeak",
        fires=[
            *endpoints("trimtab_endpoint_requests", 9, 20),
            *endpoints("trimtab_endpoint_reported_requests", 9, 12),
        ],
        # As many, but not all the time: it comes down to what the engine has.
        quiet=[
            (f'trimtab_endpoint_requests{{{POOL}, model_server="10.0.0.2:8000"}}', " ".join(["20", "4"] * (LONG // 2))),
            *endpoints("trimtab_endpoint_reported_requests", 9, 12),
        ],
        summary="Pool models/chat counts 8 requests that are not there.",
        severity="warning",
    ),
    Case(
        alert="TrimtabStoreUnreachable",
        fires=[*pickers("trimtab_state_connected", 1, 0), *endpoints("trimtab_sidecar_state_connected", 1)],
        quiet=[*pickers("trimtab_state_connected", 1, 1), *endpoints("trimtab_sidecar_state_connected", 1)],
        summary="Parts of pool models/chat do not reach the store; they go on with what they know.",
        severity="critical",
    ),
    Case(
        alert="TrimtabStoreUnreachable",
        fires=[*pickers("trimtab_state_connected", 1), *endpoints("trimtab_sidecar_state_connected", 1, 0)],
        quiet=[*pickers("trimtab_state_connected", 1), gauge("trimtab_operator_pool_store_connected", 1)],
        summary="Parts of pool models/chat do not reach the store; they go on with what they know.",
        severity="critical",
    ),
    Case(
        alert="TrimtabLogLag",
        fires=[*pickers("trimtab_log_lag_seconds", 90), *pickers("trimtab_state_connected", 1)],
        quiet=[*pickers("trimtab_log_lag_seconds", 90), *pickers("trimtab_state_connected", 0)],
        summary="Picker picker-1 of models/chat is 1m 30s behind the shared state.",
        severity="warning",
        labels=INSTANCE,
    ),
    Case(
        alert="TrimtabEndpointsUnsynced",
        fires=pickers("trimtab_unsynced_endpoints", 2, 0),
        quiet=pickers("trimtab_unsynced_endpoints", 0, 0),
        summary="Pickers of pool models/chat wait in vain for snapshots (endpoints without, 2).",
        severity="warning",
    ),
    Case(
        alert="TrimtabHashMatchRateZero",
        fires=[
            gauge("trimtab_predicted_hit_tokens_total", 0, f'{POOL}, model_name="m"'),
            counter("trimtab_prompt_tokens_total", 60_000, f'{POOL}, model_name="m"'),
            *[counter(name, value, f'{POOL}, model_server="10.0.0.1:8000"') for name, value in (
                ("trimtab_sidecar_cache_hit_tokens_total", 30_000),
                ("trimtab_sidecar_cache_query_tokens_total", 60_000),
            )],
        ],
        # Every prompt is new, so the engines find nothing either.
        quiet=[
            gauge("trimtab_predicted_hit_tokens_total", 0, f'{POOL}, model_name="m"'),
            counter("trimtab_prompt_tokens_total", 60_000, f'{POOL}, model_name="m"'),
            *[counter(name, value, f'{POOL}, model_server="10.0.0.1:8000"') for name, value in (
                ("trimtab_sidecar_cache_hit_tokens_total", 0),
                ("trimtab_sidecar_cache_query_tokens_total", 60_000),
            )],
        ],
        summary="Pickers of models/chat find no prompt in any cache.",
        severity="warning",
    ),
    Case(
        alert="TrimtabHashMatchRateZero",
        # No sidecar is scraped, so nobody can say that there is nothing to find.
        fires=[
            gauge("trimtab_predicted_hit_tokens_total", 0, f'{POOL}, model_name="m"'),
            counter("trimtab_prompt_tokens_total", 60_000, f'{POOL}, model_name="m"'),
        ],
        quiet=[
            counter("trimtab_predicted_hit_tokens_total", 20_000, f'{POOL}, model_name="m"'),
            counter("trimtab_prompt_tokens_total", 60_000, f'{POOL}, model_name="m"'),
        ],
        summary="Pickers of models/chat find no prompt in any cache.",
        severity="warning",
    ),
    Case(
        alert="TrimtabSidecarMissing",
        fires=endpoints("trimtab_endpoint_state", 1, 1, more=', state="no_heartbeat"'),
        quiet=endpoints("trimtab_endpoint_state", 1, 1, more=', state="serving"'),
        summary="Endpoints of pool models/chat are without a sidecar that is heard (2); their caches are guessed.",
        severity="warning",
    ),
    Case(
        alert="TrimtabEndpointApproximate",
        fires=[*endpoints("trimtab_sidecar_is_approximate", 1, 0), *endpoints("trimtab_sidecar_engine_up", 1, 1)],
        quiet=[*endpoints("trimtab_sidecar_is_approximate", 1, 0), *endpoints("trimtab_sidecar_engine_up", 0, 1)],
        summary="Endpoints of pool models/chat have sidecars that cannot tell their caches exactly (1).",
        severity="info",
    ),
    Case(
        alert="TrimtabEndpointApproximate",
        # Scraped by two jobs, it is still one.
        fires=[
            *endpoints("trimtab_sidecar_is_approximate", 1, more=', job="a"'),
            *endpoints("trimtab_sidecar_is_approximate", 1, more=', job="b"'),
            *endpoints("trimtab_sidecar_engine_up", 1, more=', job="a"'),
            *endpoints("trimtab_sidecar_engine_up", 1, more=', job="b"'),
        ],
        quiet=[*endpoints("trimtab_sidecar_is_approximate", 0), *endpoints("trimtab_sidecar_engine_up", 1)],
        summary="Endpoints of pool models/chat have sidecars that cannot tell their caches exactly (1).",
        severity="info",
    ),
    Case(
        alert="TrimtabFallbackActive",
        fires=[gauge("trimtab_operator_pool_fallback_active", 1)],
        quiet=[gauge("trimtab_operator_pool_fallback_active", 0)],
        summary="Pool models/chat is in round robin, because of hotspot alarms.",
        severity="warning",
    ),
    Case(
        alert="TrimtabHotspot",
        fires=pickers("trimtab_hotspot_classes", 0, 2),
        quiet=pickers("trimtab_hotspot_classes", 0, 0),
        summary="Requests of 2 prefixes load the endpoints of pool models/chat that hold them beyond their share.",
        severity="info",
    ),
    Case(
        alert="TrimtabEndpointImbalance",
        fires=[
            *endpoints("trimtab_endpoint_requests", 40, 0, 0, 0),
            *endpoints("trimtab_endpoint_candidate", 1, 1, 1, 1),
        ],
        # The three that have nothing cannot be chosen.
        quiet=[
            *endpoints("trimtab_endpoint_requests", 40, 0, 0, 0),
            *endpoints("trimtab_endpoint_candidate", 1, 0, 0, 0),
        ],
        summary="Pool models/chat is uneven; its endpoints' requests vary by 173.2% of their mean.",
        severity="warning",
    ),
    Case(
        alert="TrimtabEndpointImbalance",
        fires=[
            *endpoints("trimtab_endpoint_requests", 20, 0),
            *endpoints("trimtab_endpoint_candidate", 1, 1),
        ],
        # Too few requests to be even.
        quiet=[
            *endpoints("trimtab_endpoint_requests", 4, 0),
            *endpoints("trimtab_endpoint_candidate", 1, 1),
        ],
        summary="Pool models/chat is uneven; its endpoints' requests vary by 100% of their mean.",
        severity="warning",
    ),
    Case(
        alert="TrimtabOperatorNotLeading",
        fires=[gauge("trimtab_operator_leader", 0, f'instance="{name}"') for name in "ab"],
        quiet=[gauge("trimtab_operator_leader", name == "b", f'instance="{name}"') for name in "ab"],
        summary="No operator works; pools do not learn of pods that come and go.",
        severity="critical",
        labels={},
    ),
    Case(
        alert="TrimtabOperatorNotLeading",
        fires=pickers("trimtab_ready", 1),
        quiet=[gauge("trimtab_operator_leader", 1, 'instance="a"')],
        summary="No operator works; pools do not learn of pods that come and go.",
        severity="critical",
        labels={},
    ),
    Case(
        alert="TrimtabOperatorNotLeading",
        # Two installations in a cluster: the other one's operator is none of this one's.
        fires=[
            gauge("trimtab_operator_leader", 1, 'instance="a", namespace="one"'),
            gauge("trimtab_operator_leader", 0, 'instance="b", namespace="two"'),
        ],
        quiet=[gauge("trimtab_operator_leader", 1, f'instance="a", namespace="{name}"') for name in ("one", "two")],
        summary="No operator works in namespace two; pools do not learn of pods that come and go.",
        severity="critical",
        labels={"namespace": "two"},
    ),
    Case(
        alert="TrimtabOperatorNotLeading",
        # It crashes over and over, so there is nothing to scrape.
        fires=[
            gauge("trimtab_operator_leader", 1, 'instance="a", namespace="one"'),
            ('trimtab_operator_leader{instance="b", namespace="two"}', "1x20"),
        ],
        # One that was there long ago.
        quiet=[
            gauge("trimtab_operator_leader", 1, 'instance="a", namespace="one"'),
            ('trimtab_operator_leader{instance="b", namespace="two"}', "1x5"),
        ],
        summary="No operator works in namespace two; pools do not learn of pods that come and go.",
        severity="critical",
        labels={"namespace": "two"},
        at_minutes=75,
    ),
    Case(
        alert="TrimtabReconcileErrors",
        fires=[counter("trimtab_operator_reconcile_errors_total", 1)],
        quiet=[counter("trimtab_operator_reconcile_errors_total", 0.1)],
        summary="The operator fails again and again at pool models/chat.",
        severity="warning",
    ),
    Case(
        alert="TrimtabPolicyNotInForce",
        fires=[gauge("trimtab_operator_pool_policies_refused", 1)],
        quiet=[gauge("trimtab_operator_pool_policies_refused", 0)],
        summary="A SchedulingPolicy for pool models/chat is not in force; what it says has no effect.",
        severity="warning",
    ),
    Case(
        alert="TrimtabChildrenNotApplied",
        fires=[gauge("trimtab_operator_pool_apply_problems", 2)],
        quiet=[gauge("trimtab_operator_pool_apply_problems", 0)],
        summary="The operator cannot make 2 objects of pool models/chat.",
        severity="warning",
    ),
    Case(
        alert="TrimtabWebhookCertificateExpiring",
        fires=[gauge(EXPIRY, 7 * DAY, 'instance="a"')],
        quiet=[
            gauge(EXPIRY, 30 * DAY, 'instance="a"'),
            # There is none.
            gauge(EXPIRY, 0, 'instance="b"'),
        ],
        summary="The webhook's certificate ends in 6d 22h 30m 0s; then no pod gets a sidecar.",
        severity="warning",
        labels={},
        at_minutes=90,
    ),
    Case(
        alert="TrimtabWebhookCertificateExpiring",
        fires=[
            gauge(EXPIRY, 7 * DAY, 'namespace="one"'),
            gauge(EXPIRY, 90 * DAY, 'namespace="two"'),
        ],
        # Of one installation: what was before it was renewed, and what is now.
        quiet=[
            gauge(EXPIRY, 7 * DAY, 'instance="a", namespace="one"'),
            gauge(EXPIRY, 90 * DAY, 'instance="b", namespace="one"'),
        ],
        summary="The webhook's certificate ends in 6d 22h 30m 0s; then no pod gets a sidecar.",
        severity="warning",
        labels={"namespace": "one"},
        at_minutes=90,
    ),
    Case(
        alert="TrimtabCrdOutdated",
        fires=[gauge("trimtab_operator_crd_differs", 1, 'instance="a"')],
        quiet=[gauge("trimtab_operator_crd_differs", 0, 'instance="a"')],
        summary="The cluster's SchedulingPolicy CRD is of another release than the operator.",
        severity="info",
        labels={},
        at_minutes=90,
    ),
)  # fmt: skip
