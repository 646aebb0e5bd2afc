"""Envoy configurations of the hop benchmark that are not ours: the backends, and a gateway as other pickers expect it.

Backends answer at once, so that what is measured is the way to them. The gateway is what the reference picker is made
for: streamed bodies both ways.
"""

import json
from typing import Any

HCM = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
OVERRIDE_HOST = "type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
ROUND_ROBIN = "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
HTTP_OPTIONS = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
LIMITS = {"thresholds": [{"max_connections": 40000, "max_pending_requests": 40000, "max_requests": 40000}]}

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m"} 0.1
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""} 1
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="60000"} 1
"""
ANSWER = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 500, "completion_tokens": 1, "total_tokens": 501},
    }
)


def _listener(name: str, address: str, port: int, routes: list[Any], filters: list[Any]) -> dict[str, Any]:
    router = {"name": "router", "typed_config": {"@type": ROUTER}}
    manager = {
        "@type": HCM,
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": routes}]},
        "http_filters": [*filters, router],
    }
    return {
        "name": name,
        "address": {"socket_address": {"address": address, "port_value": port}},
        "per_connection_buffer_limit_bytes": 4 << 20,
        "filter_chains": [{"filters": [{"name": "hcm", "typed_config": manager}]}],
    }


def _policy(name: str, kind: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    extension = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": config or {"@type": kind}}
    return {"typed_extension_config": extension}


def _assignment(name: str, sockets: list[tuple[str, int]]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": {"socket_address": {"address": a, "port_value": p}}}} for a, p in sockets]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def backends(addresses: list[str], port: int) -> str:
    """One listener for each address; every request is answered with a short chat completion."""

    def answer(text: str) -> dict[str, Any]:
        return {"direct_response": {"status": 200, "body": {"inline_string": text}}}

    routes = [{"match": {"prefix": "/metrics"}, **answer(METRICS)}, {"match": {"prefix": "/"}, **answer(ANSWER)}]
    listeners = [_listener(f"b{i}", address, port, routes, []) for i, address in enumerate(addresses)]
    return json.dumps({"static_resources": {"listeners": listeners}})


def streaming_gateway(listen_port: int, picker_port: int, addresses: list[str], backend_port: int) -> str:
    """A gateway with bodies FULL_DUPLEX_STREAMED both ways, its picker on loopback in plaintext."""
    mode = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }
    ext_proc = {
        "name": "ext_proc",
        "typed_config": {
            "@type": EXT_PROC,
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
            "message_timeout": "10s",
            "processing_mode": mode,
        },
    }
    override = {
        "@type": OVERRIDE_HOST,
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}],
        "fallback_policy": {"policies": [_policy("round_robin", ROUND_ROBIN)]},
    }
    pods = {
        "name": "pods",
        "type": "STATIC",
        "circuit_breakers": LIMITS,
        "load_balancing_policy": {"policies": [_policy("override_host", OVERRIDE_HOST, override)]},
        "load_assignment": _assignment("pods", [(address, backend_port) for address in addresses]),
    }
    http2 = {"@type": HTTP_OPTIONS, "explicit_http_config": {"http2_protocol_options": {}}}
    picker = {
        "name": "picker",
        "type": "STATIC",
        "circuit_breakers": LIMITS,
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": _assignment("picker", [("127.0.0.1", picker_port)]),
    }
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "pods", "timeout": "0s"}}]
    listener = _listener("front", "127.0.0.1", listen_port, routes, [ext_proc])
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [pods, picker]}})
