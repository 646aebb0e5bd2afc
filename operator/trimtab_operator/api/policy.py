"""A SchedulingPolicy (`trimtab.dev/v1alpha1`): all that can be set about a pool, and the definition of its schema.

The one rule: this is the only place that says which fields there are, what they mean, their defaults and bounds. The
CRD in `crds/` and the reference in `docs/` are generated from it (`make generate`); `PolicySpec.of` reads by it.
Every field but `targetRef` has a default, so that a pool without a policy runs with `PolicySpec` of its own name.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

POLICY_GROUP: Final = "trimtab.dev"
POLICY_VERSION: Final = "v1alpha1"
POLICY_KIND: Final = "SchedulingPolicy"
POLICY_PLURAL: Final = "schedulingpolicies"

Mode = Literal["Auto", "Product", "RoundRobin", "LeastRequest"]


class ApiStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Part of an API object: camelCase on the wire, unknown fields are errors that name them."""


class TargetRef(ApiStruct):
    """The InferencePool that the policy is for, in the policy's own namespace."""

    name: Annotated[str, Meta(min_length=1, max_length=253, description="Name of the InferencePool.")]
    group: Annotated[Literal["inference.networking.k8s.io"], Meta(description="API group of the pool.")] = (
        "inference.networking.k8s.io"
    )
    kind: Annotated[Literal["InferencePool"], Meta(description="Kind of the pool.")] = "InferencePool"


class Fallback(ApiStruct):
    """When a pool goes to round robin because its hotspot detectors keep firing, and when it comes back."""

    enabled: Annotated[bool, Meta(description="Whether alarms may switch the pool to round robin at all.")] = True
    alarms: Annotated[
        int, Meta(ge=1, le=1000, description="Alarms within `windowSeconds` that switch the pool to round robin.")
    ] = 5
    window_seconds: Annotated[int, Meta(ge=5, le=3600, description="The window in which alarms are counted.")] = 120
    quiet_seconds: Annotated[
        int, Meta(ge=5, le=86400, description="Without any alarm for this long, the pool goes back to the product.")
    ] = 120
    minimum_stay_seconds: Annotated[
        int, Meta(ge=0, le=86400, description="The least time in round robin, however quiet it is.")
    ] = 300


class ResourceRequirements(ApiStruct):
    """CPU and memory of a container, as in a pod."""

    requests: Annotated[dict[str, str], Meta(description="Least amounts, by resource name.")] = {}
    limits: Annotated[dict[str, str], Meta(description="Most amounts, by resource name.")] = {}


class Picker(ApiStruct):
    """The endpoint pickers of the pool: one Deployment, whose replicas all serve."""

    replicas: Annotated[int, Meta(ge=1, le=64, description="Pickers that run.")] = 2
    image: Annotated[str, Meta(max_length=512, description="Image; empty: the operator's default.")] = ""
    tls: Annotated[
        bool,
        Meta(description="Serve ext_proc with TLS (a self-signed certificate), as Gateway API gateways expect it."),
    ] = True
    stream_seconds_max: Annotated[
        int,
        Meta(
            ge=1,
            le=86400,
            description="The longest stream that a picker which is replaced waits for; its termination grace period.",
        ),
    ] = 3600
    body_bytes_max: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="The largest request body; a larger one is answered with 413.")
    ] = 32 << 20
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="What is logged.")] = "info"
    resources: Annotated[
        ResourceRequirements, Meta(description="CPU and memory of a picker; empty: sized for 64 endpoints.")
    ] = ResourceRequirements()
    node_selector: Annotated[dict[str, str], Meta(description="Labels of the nodes that pickers may run on.")] = {}
    tolerations: Annotated[
        list[dict[str, Any]], Meta(max_length=32, description="Tolerations of the picker pods, as in a pod.")
    ] = []
    priority_class_name: Annotated[str, Meta(max_length=253, description="PriorityClass of the picker pods.")] = ""


class Standalone(ApiStruct):
    """An Envoy of the pool's own in front of it, for clusters without a Gateway API gateway."""

    enabled: Annotated[
        bool | None, Meta(description="Whether the pool has its own Envoy; null: the operator's default.")
    ] = None
    replicas: Annotated[int, Meta(ge=1, le=64, description="Envoys that run.")] = 2
    image: Annotated[str, Meta(max_length=512, description="Image; empty: the operator's default.")] = ""
    port: Annotated[int, Meta(ge=1, le=65535, description="Port of the Envoy's Service, plain HTTP.")] = 80
    service_type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], Meta(description="Type of the Envoy's Service.")
    ] = "ClusterIP"
    access_log: Annotated[bool, Meta(description="One JSON line per request on standard output.")] = False
    resources: Annotated[
        ResourceRequirements, Meta(description="CPU and memory of an Envoy; empty: one core's worth.")
    ] = ResourceRequirements()


class Sidecar(ApiStruct):
    """The sidecar beside each engine of the pool."""

    inject: Annotated[
        bool,
        Meta(
            description="Put the sidecar into new pods of the pool. The namespace must carry the label"
            " `trimtab.dev/inject: enabled`."
        ),
    ] = False
    engine: Annotated[
        Literal["auto", "vllm", "sglang"], Meta(description="Engine in the pods; auto: told from its command.")
    ] = "auto"
    engine_container: Annotated[
        str, Meta(max_length=63, description="Container that runs the engine; empty: the one with the target port.")
    ] = ""
    kind: Annotated[
        Literal["Native", "Container"],
        Meta(description="Native: an init container that restarts (Kubernetes 1.29). Container: an ordinary one."),
    ] = "Native"
    image: Annotated[str, Meta(max_length=512, description="Image; empty: the operator's default.")] = ""
    resources: Annotated[
        ResourceRequirements, Meta(description="CPU and memory of a sidecar; empty: 25m and 128Mi, at most 256Mi.")
    ] = ResourceRequirements()


class PolicySpec(ApiStruct):
    """All that can be set about one pool."""

    target_ref: TargetRef
    mode: Annotated[
        Mode,
        Meta(
            description="How endpoints are chosen. Auto: the least P-token x BS, and round robin while the fallback is"
            " active. Any other: that one, whatever the detectors say."
        ),
    ] = "Auto"
    batch_limit: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        Meta(description="Requests at which an endpoint is no candidate any more; null: no limit."),
    ] = None
    data_parallel_ranks: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None,
        Meta(description="Data-parallel ranks behind each target port; null: as the engine's arguments say."),
    ] = None
    fallback: Annotated[Fallback, Meta(description=Fallback.__doc__)] = Fallback()
    picker: Annotated[Picker, Meta(description=Picker.__doc__)] = Picker()
    standalone: Annotated[Standalone, Meta(description=Standalone.__doc__)] = Standalone()
    sidecar: Annotated[Sidecar, Meta(description=Sidecar.__doc__)] = Sidecar()

    @classmethod
    def of(cls, spec: object) -> "PolicySpec":
        """From the API's JSON. Raises PolicyError, which names the field and the remedy."""
        try:
            return msgspec.convert(spec, cls)
        except msgspec.ValidationError as error:
            raise PolicyError(str(error)) from error

    @classmethod
    def default(cls, pool_name: str) -> "PolicySpec":
        """Of a pool without a policy."""
        return cls(target_ref=TargetRef(name=pool_name))


class PolicyError(ValueError):
    """A policy that cannot be used: the text names the field."""
