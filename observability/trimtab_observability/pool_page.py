"""The dashboard "Trimtab / One pool": how its requests are placed, what the caches give, and what it costs them.

The one rule: the terms of the decision are all here, under the names that `trimtab explain` uses: P, B, hit, queued.
"""

from typing import Final

from trimtab_observability.dashboard import ONE, Page, of_endpoints, quantile, rate, ratio
from trimtab_observability.panels import GREEN, ORANGE, RED, Limit, Query, lines, number, spread

ENDPOINT: Final = "{{model_server}}"
PRODUCT: Final = f"max by (model_server) (avg_over_time(trimtab_endpoint_product{{{ONE}}}[1m]))"
"""Over a minute: the product of one moment is mostly the last long prompt."""
ENGINE_HITS: Final = ("trimtab_sidecar_cache_hit_tokens_total", "trimtab_sidecar_cache_query_tokens_total")

NUMBERS: Final = (
    number(
        "Policy",
        Query(f"max by (policy) (trimtab_policy{{{ONE}}}) == 1", "{{policy}}"),
        text="How the pickers choose now. round_robin: by the policy's mode, or the fallback.",
        is_name=True,
    ),
    number(
        "Fallback",
        Query(f"max(trimtab_operator_pool_fallback_active{{{ONE}}})"),
        text="1 while hotspot alarms keep the pool in round robin.",
        base=GREEN,
        limits=[Limit(1, ORANGE)],
    ),
    number(
        "Endpoints",
        Query(f"sum({of_endpoints('trimtab_endpoint_candidate', ONE)})"),
        text="That may be chosen.",
        base=RED,
        limits=[Limit(1, GREEN)],
    ),
    number(
        "Known exactly",
        Query(f"sum({of_endpoints('trimtab_endpoint_exact', ONE)})"),
        text="Endpoints whose cache is known chunk by chunk. Fewer than all: see Approximate placements.",
    ),
    number("Requests", Query(f"sum({rate('trimtab_decisions_total', ONE)})"), text="Placed.", unit="reqps"),
    number(
        "Expected hit rate",
        Query(ratio("trimtab_predicted_hit_tokens_total", "trimtab_prompt_tokens_total", ONE)),
        text="Share of the prompt tokens that the chosen endpoints were expected to hold.",
        unit="percentunit",
    ),
    number(
        "Engines' hit rate",
        Query(ratio(*ENGINE_HITS, ONE)),
        text="Share that they found, by their own count: all of their traffic, theirs that came past us included.",
        unit="percentunit",
    ),
    number(
        "First token p50",
        Query(quantile(0.5, "trimtab_first_token_seconds", ONE)),
        text="From the choice to the first token, where that is seen.",
        unit="s",
    ),
)

PLACEMENT: Final = (
    lines(
        "Product P x B by endpoint",
        Query(of_endpoints("trimtab_endpoint_product", ONE), ENDPOINT),
        text="What a request would find whose whole prompt is cached there: the queued tokens (at least a block) times"
        " the requests, itself included. Even lines are an even pool.",
        is_log=True,
    ),
    lines(
        "Variance of the product",
        Query(f"stdvar({PRODUCT})", "variance over the endpoints"),
        text="Of each endpoint's mean over a minute. What the product is there to keep small.",
        is_log=True,
    ),
    lines(
        "Evenness",
        Query(f"stddev({PRODUCT}) / avg({PRODUCT})", "product"),
        Query(
            f"stddev(max by (model_server) (avg_over_time(trimtab_endpoint_requests{{{ONE}}}[1m])))"
            f" / (avg(max by (model_server) (avg_over_time(trimtab_endpoint_requests{{{ONE}}}[1m]))) > 0)",
            "requests",
        ),
        text="Standard deviation over the endpoints as a share of their mean (coefficient of variation), of the means"
        " over a minute. 0: all alike. A pool with few requests is uneven by chance.",
    ),
    lines(
        "Requests by endpoint (B)",
        Query(of_endpoints("trimtab_endpoint_requests", ONE), ENDPOINT),
        text="Open reservations of all pickers and what came past them.",
    ),
    lines(
        "Requests as engines report them",
        Query(of_endpoints("trimtab_endpoint_reported_requests", ONE), ENDPOINT),
        text="Running and waiting. Lower than B for long: reservations that nobody ended.",
    ),
    lines(
        "Queued tokens by endpoint",
        Query(of_endpoints("trimtab_endpoint_queued_tokens", ONE), ENDPOINT),
        text="Uncached prompt tokens sent and not yet prefilled: the queue in P.",
    ),
    lines(
        "P of the chosen endpoint",
        Query(quantile(0.5, "trimtab_chosen_p_tokens", ONE), "p50"),
        Query(quantile(0.9, "trimtab_chosen_p_tokens", ONE), "p90"),
        Query(quantile(0.99, "trimtab_chosen_p_tokens", ONE), "p99"),
        text="Tokens to prefill there before the request's first token, its own included.",
        is_log=True,
    ),
    lines(
        "B of the chosen endpoint",
        Query(quantile(0.5, "trimtab_chosen_batch", ONE), "p50"),
        Query(quantile(0.9, "trimtab_chosen_batch", ONE), "p90"),
        Query(quantile(0.99, "trimtab_chosen_batch", ONE), "p99"),
        text="Batch size: requests there, this one included.",
    ),
    lines(
        "Placed, by what decided",
        Query(f"sum by (reason) ({rate('trimtab_decisions_total', ONE)})", "{{reason}}"),
        text="As in `trimtab explain`.",
        unit="reqps",
        is_stacked=True,
    ),
)

HITS: Final = (
    lines(
        "Hit rate, predicted and actual",
        Query(
            ratio("trimtab_predicted_hit_tokens_total", "trimtab_prompt_tokens_total", ONE), "predicted, all requests"
        ),
        Query(ratio(*ENGINE_HITS, ONE), "actual, as the engines count"),
        Query(
            ratio("trimtab_measured_predicted_hit_tokens_total", "trimtab_measured_prompt_tokens_total", ONE),
            "predicted, where usage was seen",
        ),
        Query(
            ratio("trimtab_measured_hit_tokens_total", "trimtab_measured_prompt_tokens_total", ONE),
            "actual, where usage was seen",
        ),
        text="In tokens. The second pair is of the same requests: those whose responses pass through a picker and tell"
        " their usage. An engine that drops blocks before its turn finds less than was predicted.",
        unit="percentunit",
        most=1.0,
    ),
    spread(
        "Predicted hit rate of single requests",
        Query(f"sum by (le) (increase(trimtab_predicted_hit_ratio_bucket{{{ONE}}}[$__rate_interval]))"),
        text="How many requests were expected to find which share of their prompt.",
    ),
    spread(
        "Actual hit rate of single requests",
        Query(f"sum by (le) (increase(trimtab_measured_hit_ratio_bucket{{{ONE}}}[$__rate_interval]))"),
        text="The same as engines reported it, where usage was seen.",
    ),
    lines(
        "Engines' hit rate by endpoint",
        Query(ratio(*ENGINE_HITS, ONE, by="model_server"), ENDPOINT),
        text="By their own count.",
        unit="percentunit",
        most=1.0,
    ),
    lines(
        "Approximate placements",
        Query(f"sum by (reason) ({rate('trimtab_approximate_decisions_total', ONE)})", "{{reason}}"),
        text="Placed without an exact view of the prefix, by why.",
        unit="reqps",
        is_stacked=True,
    ),
    lines(
        "Chunks published by endpoint",
        Query(f"sum by (model_server) (trimtab_sidecar_chunks{{{ONE}}})", ENDPOINT),
        text="64 bytes of text each, as the sidecars publish them.",
    ),
)

SERVICE: Final = (
    lines(
        "Time to first token",
        Query(quantile(0.5, "trimtab_first_token_seconds", ONE), "p50"),
        Query(quantile(0.9, "trimtab_first_token_seconds", ONE), "p90"),
        Query(quantile(0.99, "trimtab_first_token_seconds", ONE), "p99"),
        text="From the choice to the first token in the response or to the KV event of the prompt's last block. Prompts"
        " that were cached whole make no event and are not in it.",
        unit="s",
    ),
    lines(
        "First tokens, by how they were known",
        Query(f"sum by (seen_by) ({rate('trimtab_first_tokens_total', ONE)})", "{{seen_by}}"),
        text="response: in the body; kv_events: by the engine's events; prefill_rate: not seen, taken as there.",
        unit="reqps",
        is_stacked=True,
    ),
    lines(
        "Refused, and served elsewhere",
        Query(f"sum by (reason) ({rate('trimtab_rejected_total', ONE)})", "{{reason}}"),
        Query(f"sum({rate('trimtab_moved_requests_total', ONE)})", "served by another endpoint"),
        text="Refusals by reason; requests that another endpoint served than the one chosen: it was dead, or refused.",
        unit="reqps",
    ),
    lines(
        "KV cache held by requests",
        Query(of_endpoints("trimtab_endpoint_kv_usage", ONE), ENDPOINT),
        text="Share of it; cached prefixes that nobody uses count as free. Near 1 the engine preempts.",
        unit="percentunit",
        most=1.0,
    ),
    lines(
        "Prefill rate",
        Query(of_endpoints("trimtab_endpoint_prefill_rate", ONE), ENDPOINT),
        text="Tokens per second, as the first tokens show it.",
    ),
    lines(
        "Endpoints by state",
        Query(f"count by (state) (max by (model_server, state) (trimtab_endpoint_state{{{ONE}}}))", "{{state}}"),
        text="serving; no_heartbeat: no sidecar is heard; draining, asleep, unreachable: nothing new is sent there.",
        is_stacked=True,
    ),
)

MODE: Final = (
    lines(
        "Policy over time",
        Query(f"max by (policy) (trimtab_policy{{{ONE}}})", "{{policy}}"),
        text="1 for the policy in force, as the pickers have it.",
        most=1.0,
    ),
    lines(
        "Policy switches",
        Query(f"max(trimtab_operator_policy_switches{{{ONE}}})", "since the operator's start"),
        text="Each is an Event and a condition of the policy.",
    ),
    lines(
        "Waiting for a place",
        Query(f"sum(trimtab_waiting_requests{{{ONE}}})", "waiting now"),
        Query(f"sum by (outcome) ({rate('trimtab_waits_total', ONE)})", "{{outcome}}, per second"),
        text="Requests that wait in the pickers because every endpoint is at its limit, and how waits end. Only with"
        " `spec.whenFull.action: Wait`.",
    ),
)

HOTSPOTS: Final = (
    lines(
        "Hotspots now",
        Query(f"max(trimtab_hotspot_classes{{{ONE}}})", "with an alarm"),
        Query(f"max(trimtab_hotspot_acted_on_classes{{{ONE}}})", "acted on"),
        text="Prefix classes that bring more load than the endpoints which hold their prefix can carry as their share,"
        " of the picker that sees most. Acted on: these endpoints are left out for them.",
    ),
    lines(
        "Hotspot alarms",
        Query(f"sum(increase(trimtab_hotspot_raised_total{{{ONE}}}[$__rate_interval]))", "raised"),
        Query(f"sum(increase(trimtab_hotspot_acted_on_total{{{ONE}}}[$__rate_interval]))", "acted on"),
        Query(
            f"sum(increase(trimtab_hotspot_alarms_written_total{{{ONE}}}[$__rate_interval]))", "told to the operator"
        ),
        text="Of all pickers. The operator counts what it is told, again every 15 s, and switches to round robin when"
        " it is too much.",
    ),
    lines(
        "Kept from a hotspot",
        Query(f"sum({rate('trimtab_hotspot_moved_requests_total', ONE)})", "requests"),
        text="Requests that did not go to a holder of their prefix although it had the least score.",
        unit="reqps",
    ),
)

PAGE: Final = Page(
    name="pool",
    title="Trimtab / One pool",
    text="How one pool's requests are placed, what the caches give, and how its endpoints do.",
    is_of_one_pool=True,
    rows=(
        ("", NUMBERS),
        ("Placement: P x B", PLACEMENT),
        ("Cache hits", HITS),
        ("Service", SERVICE),
        ("Mode", MODE),
        ("Hotspots", HOTSPOTS),
    ),
)
