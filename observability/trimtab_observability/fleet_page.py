"""The dashboard "Trimtab / Fleet at a glance": all pools of the chosen namespaces, and the operator.

The one rule: one look says whether anything needs a closer one, and the other dashboards give that.
"""

from typing import Final

from trimtab_observability.dashboard import BY_POOL, MANY, Page, quantile, rate, ratio
from trimtab_observability.panels import GREEN, ORANGE, RED, Limit, Query, lines, number, rows

ENDPOINTS: Final = f"max by ({BY_POOL}, model_server) (trimtab_endpoint_candidate{{{MANY}}})"
HIT_RATE: Final = ("trimtab_predicted_hit_tokens_total", "trimtab_prompt_tokens_total")
FIRING: Final = 'count(ALERTS{alertname=~"Trimtab.*", alertstate="firing"}) or vector(0)'

NUMBERS: Final = (
    number(
        "Alerts firing",
        Query(FIRING),
        text="Of Trimtab's own rules, in all namespaces. Each has an entry in the runbook.",
        base=GREEN,
        limits=[Limit(1, RED)],
    ),
    number(
        "Pools",
        Query(f"count(count by ({BY_POOL}) (trimtab_ready{{{MANY}}}))"),
        text="Pools with a picker that answers Prometheus.",
    ),
    number(
        "Pickers not ready",
        Query(f"sum(1 - trimtab_ready{{{MANY}}})"),
        text="Of those that answer Prometheus. A picker that is not ready lets the gateway go on without it.",
        base=GREEN,
        limits=[Limit(1, RED)],
    ),
    number(
        "Endpoints",
        Query(f"sum({ENDPOINTS})"),
        text="That may be chosen: serving, and not draining.",
        base=RED,
        limits=[Limit(1, GREEN)],
    ),
    number("Requests", Query(f"sum({rate('trimtab_decisions_total', MANY)})"), text="Placed.", unit="reqps"),
    number(
        "Expected hit rate",
        Query(ratio(*HIT_RATE, MANY)),
        text="Share of the prompt tokens that the chosen endpoints were expected to hold already.",
        unit="percentunit",
    ),
    number(
        "Scheduler p99",
        Query(quantile(0.99, "trimtab_scheduler_seconds", MANY)),
        text="Match, score and reserve. Above 1 ms something takes the pickers' time.",
        unit="s",
        base=GREEN,
        limits=[Limit(0.0005, ORANGE), Limit(0.001, RED)],
    ),
    number(
        "Pools in fallback",
        Query(f"sum(trimtab_operator_pool_fallback_active{{{MANY}}})"),
        text="In round robin, because of hotspot alarms.",
        base=GREEN,
        limits=[Limit(1, ORANGE)],
    ),
)

TABLE: Final = rows(
    "Pools now",
    [
        ("Requests", Query(f"sum by ({BY_POOL}) ({rate('trimtab_decisions_total', MANY)})"), "reqps"),
        ("Endpoints", Query(f"sum by ({BY_POOL}) ({ENDPOINTS})"), "short"),
        (
            "Known exactly",
            Query(
                f"sum by ({BY_POOL}) (max by ({BY_POOL}, model_server) (trimtab_endpoint_exact{{{MANY}}}))",
            ),
            "short",
        ),
        ("Pickers ready", Query(f"sum by ({BY_POOL}) (trimtab_ready{{{MANY}}})"), "short"),
        ("Expected hit rate", Query(ratio(*HIT_RATE, MANY, by=BY_POOL)), "percentunit"),
        (
            "Queued tokens",
            Query(
                f"sum by ({BY_POOL}) (max by ({BY_POOL}, model_server) (trimtab_endpoint_queued_tokens{{{MANY}}}))",
            ),
            "short",
        ),
        ("Scheduler p99", Query(quantile(0.99, "trimtab_scheduler_seconds", MANY, by=BY_POOL)), "s"),
    ],
    keys=("pool_namespace", "pool"),
    text="One row for each pool. Endpoints that are not known exactly are routed by what was sent there.",
)

POOL: Final = "{{pool_namespace}}/{{pool}}"
TRAFFIC: Final = (
    lines(
        "Requests placed",
        Query(f"sum by ({BY_POOL}) ({rate('trimtab_decisions_total', MANY)})", POOL),
        text="By pool.",
        unit="reqps",
        is_stacked=True,
    ),
    lines(
        "Requests refused",
        Query(f"sum by ({BY_POOL}, reason) ({rate('trimtab_rejected_total', MANY)})", POOL + " {{reason}}"),
        text="503: no_endpoints, subset_empty. 429: endpoints_full, too_many_open, wait_over, wait_queue_full,"
        " sheddable.",
        unit="reqps",
    ),
    lines(
        "Left to the gateway",
        Query(f"sum by ({BY_POOL}) ({rate('trimtab_not_ready_total', MANY)})", POOL + " not ready"),
        Query(f"sum by ({BY_POOL}) ({rate('trimtab_failures_total', MANY)})", POOL + " failed"),
        text="Streams that a picker ended without a choice: the gateway's failure mode decided. Should be zero.",
        unit="reqps",
    ),
    lines(
        "Expected hit rate",
        Query(ratio(*HIT_RATE, MANY, by=BY_POOL), POOL),
        text="By pool, in tokens. Zero for long: see the alert TrimtabHashMatchRateZero.",
        unit="percentunit",
        most=1.0,
    ),
    lines(
        "Requests on the endpoints",
        Query(
            f"sum by ({BY_POOL}) (max by ({BY_POOL}, model_server) (trimtab_endpoint_requests{{{MANY}}}))",
            POOL,
        ),
        text="Open reservations of all pickers, and what came past them.",
        is_stacked=True,
    ),
    lines(
        "Queued tokens",
        Query(
            f"sum by ({BY_POOL}) (max by ({BY_POOL}, model_server) (trimtab_endpoint_queued_tokens{{{MANY}}}))",
            POOL,
        ),
        text="Uncached prompt tokens that were sent and not yet prefilled.",
        is_stacked=True,
    ),
)

INJECTION: Final = (
    lines(
        "Pods given a sidecar",
        Query(
            f"sum by ({BY_POOL}) (increase(trimtab_webhook_injected_total{{{MANY}}}[$__rate_interval]))",
            POOL,
        ),
        text="By the webhook, as they were created.",
    ),
    lines(
        "Pods left as they are",
        Query("sum by (reason) (increase(trimtab_webhook_skips_total[$__rate_interval]))", "{{reason}}"),
        Query('sum(increase(trimtab_webhook_requests_total{outcome="error"}[$__rate_interval]))', "error"),
        text="By reason; no_pool: of no pool that asks for sidecars. Pods that the webhook was not asked about are not"
        " here; the condition SidecarsInjected counts them.",
    ),
    lines(
        "Webhook's answers",
        Query(
            "histogram_quantile(0.5, sum by (le) (rate(trimtab_webhook_seconds_bucket[$__rate_interval])))",
            "p50",
        ),
        Query(
            "histogram_quantile(0.99, sum by (le) (rate(trimtab_webhook_seconds_bucket[$__rate_interval])))",
            "p99",
        ),
        text="What it takes the webhook to answer. The API server waits for 3 s, and then creates the pod without.",
        unit="s",
        is_log=True,
    ),
)

OPERATOR: Final = (
    lines(
        "Endpoints by how their cache is known",
        Query(f"sum by (how) (trimtab_operator_pool_endpoints_known{{{MANY}}})", "{{how}}"),
        text="exact: chunk by chunk; approximate: guessed from what was sent; silent: no sidecar is heard.",
        is_stacked=True,
    ),
    lines(
        "Pickers wanted and ready",
        Query(f"sum by (state) (trimtab_operator_pool_pickers{{{MANY}}})", "{{state}}"),
        text="As the operator sees the Deployments.",
    ),
    lines(
        "Troubles of the operator",
        Query(f"count(trimtab_operator_pool_store_connected{{{MANY}}} == 0) or vector(0)", "pools without store"),
        Query(f"sum(trimtab_operator_pool_apply_problems{{{MANY}}})", "children not applied"),
        Query(f"sum(trimtab_operator_pool_policies_refused{{{MANY}}})", "policies not in force"),
        text="Pools whose part of the store the operator cannot read; children refused or somebody else's; policies"
        " that cannot be used.",
    ),
    lines(
        "Operator at work",
        Query("sum(trimtab_operator_leader)", "replicas that work"),
        Query("max(trimtab_operator_queue_depth)", "pools that wait"),
        Query("sum(trimtab_webhook_ready)", "webhooks ready"),
        text="One replica works at a time. Pools wait for moments only. Without a webhook new pods have no sidecar.",
    ),
    lines(
        "A look at a pool",
        Query(
            "histogram_quantile(0.5, sum by (le) (rate(trimtab_operator_reconcile_seconds_bucket[$__rate_interval])))",
            "p50",
        ),
        Query(
            "histogram_quantile(0.99, sum by (le) (rate(trimtab_operator_reconcile_seconds_bucket[$__rate_interval])))",
            "p99",
        ),
        text="How long it takes the operator to put one pool in order.",
        unit="s",
    ),
    lines(
        "Webhook's certificate",
        Query("min(trimtab_operator_webhook_certificate_expiry_timestamp_seconds > 0) - time()", "time left"),
        text="Renewed at two thirds of its 90 days.",
        unit="s",
        limits=[Limit(7 * 86_400, RED)],
    ),
)

PAGE: Final = Page(
    name="fleet",
    title="Trimtab / Fleet at a glance",
    text="All pools: traffic, hit rates, endpoints, and the operator.",
    is_of_one_pool=False,
    rows=(("", (*NUMBERS, TABLE)), ("Traffic", TRAFFIC), ("Operator", OPERATOR), ("Injection", INJECTION)),
)
