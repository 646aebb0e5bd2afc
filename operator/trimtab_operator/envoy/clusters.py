"""Envoy's clusters: the pool of engines, the pickers, and Envoy's own admin API behind the stats listener.

Its one rule: a cluster says everything that its traffic needs (balancing, health, limits, timeouts), and the listener
knows it by name only. It must not know routes or filters.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterCustomClusterType,
    ClusterDiscoveryType,
    ClusterLbPolicy,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    KeepaliveSettings,
    RoutingPriority,
    SocketAddress,
    TcpKeepalive,
    TransportSocket,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    EndpointHealthCheckConfig,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.clusters.common.dns.v3 import DnsLookupFamily
from envoy_data_plane.envoy.extensions.clusters.dns.v3 import DnsCluster, DnsClusterRefreshRate
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import CommonTlsContext, UpstreamTlsContext
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions as UpstreamHttpProtocolOptions,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from trimtab_operator.envoy.front import CONNECTION_BUFFER_BYTES, DnsHosts, EnvoyFront, Hosts

POOL_CLUSTER: Final = "pool"
PICKER_CLUSTER: Final = "pickers"
LB_NAMESPACE: Final = "envoy.lb"
DESTINATION: Final = "x-gateway-destination-endpoint"
"""Request header and metadata key by which a picker names the endpoint, as the endpoint picker protocol has it."""

ENGINE_IDLE_S: Final = 4
"""Idle connections to engines: closed by us before the engine's server does it at 5 s, which would race a request."""
DNS_REFRESH_S: Final = 1
HEALTH_INTERVAL_S: Final = 1
HEALTH_TIMEOUT_S: Final = 1
PICKER_PING_S: Final = 10
"""HTTP/2 ping to a picker; unanswered for half of this, its connection and the streams on it are given up."""
PICKER_EJECTION_S: Final = 5
RETRIES_MAX: Final = 1024
"""Concurrent retries per cluster; above, a failed request stays failed, so that retries cannot become the load."""


def pool_cluster(front: EnvoyFront, hosts: Hosts, *, overridable: bool) -> Cluster:
    """The engines. `overridable`: a picker's choice is followed, round robin without one; else plain round robin."""
    cluster = _cluster(POOL_CLUSTER, front, hosts, health_port=None)
    common = HttpProtocolOptions(idle_timeout=timedelta(seconds=ENGINE_IDLE_S))
    if front.pool_http2:
        explicit = HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=Http2ProtocolOptions())
    else:
        explicit = HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions())
    _set_http(cluster, UpstreamHttpProtocolOptions(common_http_protocol_options=common, explicit_http_config=explicit))
    round_robin = LoadBalancingPolicy(
        policies=[_policy("envoy.load_balancing_policies.round_robin", Any.pack(RoundRobin()))]
    )
    if overridable:
        # Metadata before the header: no client can write metadata.
        override = OverrideHost(
            override_host_sources=[
                OverrideHostOverrideHostSource(metadata=_lb_key(DESTINATION)),
                OverrideHostOverrideHostSource(header=DESTINATION),
            ],
            selected_host_key=_lb_key(f"{DESTINATION}-served"),
            fallback_policy=round_robin,
        )
        cluster.load_balancing_policy = LoadBalancingPolicy(
            policies=[_policy("envoy.load_balancing_policies.override_host", Any.pack(override))]
        )
    else:
        cluster.load_balancing_policy = round_robin
    return cluster


def picker_cluster(front: EnvoyFront, hosts: Hosts) -> Cluster:
    """The pickers, used in turn: replicas share their state, so any of them chooses as well as any other."""
    cluster = _cluster(PICKER_CLUSTER, front, hosts, health_port=front.picker_health_port)
    cluster.lb_policy = ClusterLbPolicy.ROUND_ROBIN
    ping = KeepaliveSettings(interval=timedelta(seconds=PICKER_PING_S), timeout=timedelta(seconds=PICKER_PING_S / 2))
    http2 = Http2ProtocolOptions(connection_keepalive=ping)
    _set_http(
        cluster,
        UpstreamHttpProtocolOptions(
            explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=http2)
        ),
    )
    # With a panic threshold, "all pickers are down" would mean "send to all of them": every request would wait in vain.
    cluster.common_lb_config = ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0.0))
    cluster.health_checks = [
        HealthCheck(
            timeout=timedelta(seconds=HEALTH_TIMEOUT_S),
            interval=timedelta(seconds=HEALTH_INTERVAL_S),
            # A cluster without traffic is checked as often: the first request must not meet a dead picker.
            no_traffic_interval=timedelta(seconds=HEALTH_INTERVAL_S),
            unhealthy_threshold=2,
            healthy_threshold=1,
            grpc_health_check=HealthCheckGrpcHealthCheck(service_name=front.picker_health_service),
        )
    ]
    # Faster than the health check: after two failures in a row the picker is left out until a check passes.
    cluster.outlier_detection = OutlierDetection(
        consecutive_gateway_failure=2,
        enforcing_consecutive_gateway_failure=100,
        interval=timedelta(seconds=1),
        base_ejection_time=timedelta(seconds=PICKER_EJECTION_S),
        max_ejection_time=timedelta(seconds=PICKER_EJECTION_S),
        max_ejection_percent=100,
        enforcing_success_rate=0,
    )
    if front.picker_tls:
        cluster.transport_socket = TransportSocket(
            name="envoy.transport_sockets.tls",
            typed_config=Any.pack(UpstreamTlsContext(common_tls_context=CommonTlsContext(alpn_protocols=["h2"]))),
        )
    return cluster


def admin_cluster(front: EnvoyFront) -> Cluster:
    """Envoy's own admin API, so that a listener can show two of its pages."""
    return Cluster(
        name="admin",
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=1),
        load_assignment=ClusterLoadAssignment(
            cluster_name="admin",
            endpoints=[LocalityLbEndpoints(lb_endpoints=[_lb_endpoint("127.0.0.1", front.admin_port, None)])],
        ),
    )


def _cluster(name: str, front: EnvoyFront, hosts: Hosts, *, health_port: int | None) -> Cluster:
    if isinstance(hosts, DnsHosts):
        sockets: tuple[tuple[str, int], ...] = tuple((hosts.name, port) for port in hosts.ports)
    else:
        sockets = hosts.sockets()
    cluster = Cluster(
        name=name,
        connect_timeout=timedelta(seconds=front.connect_timeout_s),
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
        circuit_breakers=_limits(front),
        # A node that vanished sends no reset: only silence tells.
        upstream_connection_options=UpstreamConnectionOptions(
            tcp_keepalive=TcpKeepalive(keepalive_time=10, keepalive_interval=5, keepalive_probes=3)
        ),
        load_assignment=ClusterLoadAssignment(
            cluster_name=name,
            endpoints=[
                LocalityLbEndpoints(lb_endpoints=[_lb_endpoint(host, port, health_port) for host, port in sockets])
            ],
        ),
    )
    if isinstance(hosts, DnsHosts):
        refresh = timedelta(seconds=DNS_REFRESH_S)
        dns = DnsCluster(
            dns_lookup_family=DnsLookupFamily.V4_PREFERRED,
            dns_refresh_rate=refresh,
            dns_failure_refresh_rate=DnsClusterRefreshRate(base_interval=refresh, max_interval=2 * refresh),
        )
        cluster.cluster_type = ClusterCustomClusterType(name="envoy.cluster.dns", typed_config=Any.pack(dns))
        # An empty answer is a pool without pods, not a reason to hold the listener back.
        cluster.wait_for_warm_on_init = False
    else:
        cluster.type = ClusterDiscoveryType.STATIC
    return cluster


def _limits(front: EnvoyFront) -> CircuitBreakers:
    # The default of 1024 silently fails open beyond it: each streaming answer holds a request on both clusters.
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                priority=RoutingPriority.DEFAULT,
                max_connections=front.streams_max,
                max_pending_requests=front.streams_max,
                max_requests=front.streams_max,
                max_retries=RETRIES_MAX,
            )
        ]
    )


def _lb_endpoint(host: str, port: int, health_port: int | None) -> LbEndpoint:
    endpoint = Endpoint(address=Address(socket_address=SocketAddress(address=host, port_value=port)))
    if health_port is not None:
        endpoint.health_check_config = EndpointHealthCheckConfig(port_value=health_port)
    return LbEndpoint(endpoint=endpoint)


def _lb_key(key: str) -> MetadataKey:
    return MetadataKey(key=LB_NAMESPACE, path=[MetadataKeyPathSegment(key=key)])


def _policy(name: str, config: Any) -> LoadBalancingPolicyPolicy:
    return LoadBalancingPolicyPolicy(typed_extension_config=TypedExtensionConfig(name=name, typed_config=config))


def _set_http(cluster: Cluster, options: UpstreamHttpProtocolOptions) -> None:
    cluster.typed_extension_protocol_options = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Any.pack(options)
    }
