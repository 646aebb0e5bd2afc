"""Envoy's bootstrap configuration for one pool, as typed objects and as JSON (which is YAML too).

Its one rule: pure functions from `EnvoyFront` and addresses to `envoy-data-plane` messages; the same input gives the
same text. It must not start Envoy, resolve names or read files. `envoy --mode validate` is the judge of its output.

How a request travels: the client's own routing headers are removed before anything can look at them; a picker is shown
the whole of it and chooses (`envoy_ext_proc`); the pool's `override_host` policy goes to the chosen endpoint, on a
retry to the next of the list, and round robin where there is no choice.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import betterproto2
from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    HttpProtocolOptions,
    Node,
    SocketAddress,
    SubstitutionFormatString,
    TcpKeepalive,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.overload.v3 import OverloadManager, ResourceMonitor
from envoy_data_plane.envoy.config.route.v3 import (
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.access_loggers.stream.v3 import StdoutAccessLog
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import DownstreamConnectionsConfig
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.google.protobuf import Any, Struct

from trimtab_operator.envoy.clusters import (
    DESTINATION,
    POOL_CLUSTER,
    admin_cluster,
    picker_cluster,
    pool_cluster,
)
from trimtab_operator.envoy.ext_proc import RANK_HEADER, picker_filters, picker_routes
from trimtab_operator.envoy.front import CONNECTION_BUFFER_BYTES, EnvoyFront, Hosts

ENDPOINT_HEADER: Final = "x-trimtab-endpoint"
"""Response header that names the endpoint which served, under `EnvoyFront.show_endpoint`."""
STRIPPED_HEADERS: Final = (DESTINATION, f"{DESTINATION}-subset", f"{DESTINATION}-served", RANK_HEADER)
"""Request headers that a client must not send: with the first it would choose its endpoint itself, with the last the
rank behind it."""
RETRY_ON: Final = "connect-failure,refused-stream,reset,retriable-status-codes"
RETRIABLE_STATUS: Final = (503,)
"""An engine that is dead behind its API server or whose queue is full; another one can answer."""
CLIENT_KEEPALIVE_S: Final = 60
"""Silence after which a client's TCP connection is probed: a client that vanished must not hold its stream for ever."""


def bootstrap(front: EnvoyFront, *, pool: Hosts, pickers: Hosts | None) -> Bootstrap:
    """The whole configuration of one Envoy. Without pickers it is plain round robin over the pool, for comparison.

    Raises FrontError for an address that is not `ip:port`.
    """
    clusters = [pool_cluster(front, pool, overridable=pickers is not None)]
    if pickers is not None:
        clusters.append(picker_cluster(front, pickers))
    listeners = [_client_listener(front, with_picker=pickers is not None)]
    if front.stats_port is not None:
        clusters.append(admin_cluster(front))
        listeners.append(_stats_listener(front, front.stats_port))
    return Bootstrap(
        node=Node(id="trimtab-front", cluster="trimtab"),
        admin=Admin(address=_address("127.0.0.1", front.admin_port)),
        static_resources=BootstrapStaticResources(listeners=listeners, clusters=clusters),
        overload_manager=OverloadManager(
            resource_monitors=[
                ResourceMonitor(
                    name="envoy.resource_monitors.global_downstream_max_connections",
                    typed_config=Any.pack(
                        DownstreamConnectionsConfig(max_active_downstream_connections=front.downstream_connections_max)
                    ),
                )
            ]
        ),
    )


def bootstrap_json(front: EnvoyFront, *, pool: Hosts, pickers: Hosts | None) -> str:
    """`bootstrap` as indented JSON text; a YAML reader takes it too."""
    text = bootstrap(front, pool=pool, pickers=pickers).to_json(indent=2)
    return text + "\n"


def _client_listener(front: EnvoyFront, *, with_picker: bool) -> Listener:
    filters = picker_filters(front) if with_picker else []
    filters.append(_http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)))
    # Zero is "no limit": an answer may stream for as long as it likes.
    action = RouteAction(cluster=POOL_CLUSTER, timeout=timedelta(0), idle_timeout=timedelta(0))
    host = VirtualHost(
        name="pool",
        domains=["*"],
        routes=picker_routes(front, action) if with_picker else [Route(match=RouteMatch(prefix="/"), route=action)],
        retry_policy=_retry_policy(front),
        request_body_buffer_limit=front.body_bytes_max,
    )
    if front.show_endpoint:
        host.response_headers_to_add = [
            HeaderValueOption(
                header=HeaderValue(key=ENDPOINT_HEADER, value="%UPSTREAM_HOST%"),
                append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
            )
        ]
    manager = HttpConnectionManager(
        stat_prefix="front",
        route_config=RouteConfiguration(name="front", virtual_hosts=[host]),
        http_filters=filters,
        early_header_mutation_extensions=[
            TypedExtensionConfig(
                name="envoy.http.early_header_mutation.header_mutation",
                typed_config=Any.pack(
                    EarlyHeaderMutation(mutations=[HeaderMutation(remove=header) for header in STRIPPED_HEADERS])
                ),
            )
        ],
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=timedelta(hours=1)),
        stream_idle_timeout=timedelta(0),
        request_timeout=timedelta(seconds=front.upload_timeout_s),
        request_headers_timeout=timedelta(seconds=min(60.0, front.upload_timeout_s)),
        access_log=[_access_log()] if front.access_log else [],
    )
    listener = _listener("front", front.listen_address, front.listen_port, manager)
    listener.tcp_keepalive = TcpKeepalive(keepalive_time=CLIENT_KEEPALIVE_S, keepalive_interval=10, keepalive_probes=3)
    return listener


def _stats_listener(front: EnvoyFront, port: int) -> Listener:
    # Exact paths only: everything else of the admin API stays on loopback.
    routes = [
        Route(match=RouteMatch(path=path), route=RouteAction(cluster="admin"))
        for path in ("/ready", "/stats/prometheus")
    ]
    manager = HttpConnectionManager(
        stat_prefix="stats",
        route_config=RouteConfiguration(
            name="stats", virtual_hosts=[VirtualHost(name="stats", domains=["*"], routes=routes)]
        ),
        http_filters=[_http_filter("envoy.filters.http.router", Router())],
    )
    return _listener("stats", front.listen_address, port, manager)


def _listener(name: str, address: str, port: int, manager: HttpConnectionManager) -> Listener:
    network_filter = Filter(name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(manager))
    return Listener(
        name=name,
        address=_address(address, port),
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
        filter_chains=[FilterChain(filters=[network_filter])],
    )


def _retry_policy(front: EnvoyFront) -> RetryPolicy:
    return RetryPolicy(
        retry_on=RETRY_ON,
        retriable_status_codes=list(RETRIABLE_STATUS),
        num_retries=front.retries_max,
        # The picker's list is followed by itself; this keeps the round robin behind it from a host that just failed.
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts", typed_config=Any.pack(PreviousHostsPredicate())
            )
        ],
        host_selection_retry_max_attempts=5,
    )


def _access_log() -> AccessLog:
    # No header or body of the client is in here, so no prompt can be.
    fields = {
        "time": "%START_TIME%",
        "method": "%REQ(:METHOD)%",
        "path": "%PATH(NQ)%",
        "status": "%RESPONSE_CODE%",
        "flags": "%RESPONSE_FLAGS%",
        "endpoint": "%UPSTREAM_HOST%",
        "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "request_bytes": "%BYTES_RECEIVED%",
        "response_bytes": "%BYTES_SENT%",
        "duration_ms": "%DURATION%",
        "first_byte_ms": "%RESPONSE_DURATION%",
        "request_id": "%REQ(X-REQUEST-ID)%",
    }
    log = StdoutAccessLog(log_format=SubstitutionFormatString(json_format=Struct.from_dict(fields)))
    return AccessLog(name="envoy.access_loggers.stdout", typed_config=Any.pack(log))


def _http_filter(name: str, config: betterproto2.Message) -> HttpFilter:
    return HttpFilter(name=name, typed_config=Any.pack(config))


def _address(ip: str, port: int) -> Address:
    return Address(socket_address=SocketAddress(address=ip, port_value=port, ipv4_compat=ip == "::"))
