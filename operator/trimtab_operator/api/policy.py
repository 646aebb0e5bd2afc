"""A SchedulingPolicy (`trimtab.dev/v1alpha1`): all that can be set about a pool, and the definition of its schema.

The one rule: this is the only place that says which fields there are, what they mean, their defaults and bounds. The
CRD in `crds/` and the reference in `docs/` are generated from it (`make generate`); `PolicySpec.of` reads by it.
Every field but `targetRef` has a default, so that a pool without a policy runs with `PolicySpec` of its own name.
"""

import functools
from typing import Annotated, Final, Literal, TypedDict

import msgspec
from msgspec import Meta

from trimtab_operator.api.api_struct import ApiStruct
from trimtab_operator.api.faults import faults
from trimtab_operator.api.open_api import Schema, readable, structural
from trimtab_operator.api.patterns import (
    IMAGE,
    LABEL_OR_EMPTY,
    LABEL_VALUE,
    QUALIFIED_OR_EMPTY,
    SUBDOMAIN,
    SUBDOMAIN_OR_EMPTY,
)
from trimtab_operator.api.policy_rules import (
    MEMORY_HOLDS_A_BODY,
    NODE_LABELS,
    SERVICE_ANNOTATIONS,
    TOLERATIONS,
)
from trimtab_operator.api.quantity import QUANTITY, QUANTITY_LENGTH_MAX
from trimtab_operator.api.request_terms import (
    DISTINCT_CLASSES,
    Classes,
    ExpertCosts,
    HeaderName,
    Network,
    WhenFull,
)
from trimtab_operator.api.resource_rules import RESOURCE_RULES
from trimtab_operator.api.rules import broken

POLICY_GROUP: Final = "trimtab.dev"
POLICY_VERSION: Final = "v1alpha1"
POLICY_KIND: Final = "SchedulingPolicy"
POLICY_PLURAL: Final = "schedulingpolicies"

RESOURCES_MAX: Final = 16
"""Resource names in one map; the API server counts the cost of rules by it."""
FAULTS_SHOWN_MAX: Final = 3

Mode = Literal["Auto", "Product", "RoundRobin", "LeastRequest"]
_ATOMIC_MAP: Final = {"x-kubernetes-map-type": "atomic"}

Quantity = Annotated[
    str,
    Meta(
        pattern=QUANTITY,
        max_length=QUANTITY_LENGTH_MAX,
        description="An amount: a number, or a text such as 500m or 4Gi.",
        extra_json_schema={"x-kubernetes-int-or-string": True, "minimum": 0},
    ),
]
Image = Annotated[str, Meta(max_length=512, pattern=IMAGE)]


class Toleration(TypedDict, total=False):
    """A taint of nodes that pods may run on all the same. Plain JSON, since it goes into pods as it stands."""

    key: Annotated[
        str, Meta(max_length=316, pattern=QUALIFIED_OR_EMPTY, description="Key of the taint; empty: every taint.")
    ]
    operator: Annotated[
        Literal["Exists", "Equal"],
        Meta(description="Equal, the default: the taint's value must be `value`. Exists: any value."),
    ]
    value: Annotated[str, Meta(max_length=63, pattern=LABEL_VALUE, description="Value of the taint.")]
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"],
        Meta(description="Effect of the taint; left out: every effect."),
    ]
    tolerationSeconds: Annotated[
        int,
        Meta(description="How long a pod stays once the node has the taint (NoExecute only); left out: for ever."),
    ]


NodeSelector = Annotated[
    dict[str, Annotated[str, Meta(max_length=63, pattern=LABEL_VALUE, description="Value of the label.")]],
    Meta(max_length=32, description="Labels of the nodes that the pods may run on.", extra_json_schema=_ATOMIC_MAP),
]
Tolerations = Annotated[
    list[Annotated[Toleration, Meta(description="A taint of nodes that the pods may run on all the same.")]],
    Meta(
        max_length=32,
        description="Tolerations of the pods.",
        extra_json_schema={"x-kubernetes-list-type": "atomic"},
    ),
]
PriorityClass = Annotated[
    str, Meta(max_length=253, pattern=SUBDOMAIN_OR_EMPTY, description="PriorityClass of the pods; empty: none.")
]


class TargetRef(ApiStruct, frozen=True, kw_only=True):
    """The InferencePool that the policy is for, in the policy's own namespace."""

    name: Annotated[
        str, Meta(min_length=1, max_length=253, pattern=SUBDOMAIN, description="Name of the InferencePool.")
    ]
    group: Annotated[Literal["inference.networking.k8s.io"], Meta(description="API group of the pool.")] = (
        "inference.networking.k8s.io"
    )
    kind: Annotated[Literal["InferencePool"], Meta(description="Kind of the pool.")] = "InferencePool"


class Fallback(ApiStruct, frozen=True, kw_only=True):
    """When a pool goes to round robin because its hotspot detectors keep firing, and when it comes back."""

    enabled: Annotated[bool, Meta(description="Whether alarms may switch the pool to round robin at all.")] = True
    alarms: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Alarms within `windowSeconds` that switch the pool to round robin. Those of one prefix class"
            " count at most once in 10 s.",
        ),
    ] = 5
    window_seconds: Annotated[int, Meta(ge=5, le=3600, description="The window in which alarms are counted.")] = 120
    quiet_seconds: Annotated[
        int,
        Meta(
            ge=5,
            le=86400,
            description="Without any alarm for this long, the pool goes back to the product. A hotspot that lasts is"
            " told again every 15 s: less than 30 takes a short silence for its end.",
        ),
    ] = 120
    minimum_stay_seconds: Annotated[
        int, Meta(ge=0, le=86400, description="The least time in round robin, however quiet it is.")
    ] = 300


class Hotspots(ApiStruct, frozen=True, kw_only=True):
    """How the pickers look for prefixes that bring more load than the endpoints which hold them can carry."""

    mode: Annotated[
        Literal["Act", "Alarm", "Off"],
        Meta(
            description="Act: such a prefix goes to other endpoints until enough hold it, and what lasts all the same"
            " raises alarms. Alarm: alarms alone. Off: neither, so there is no fallback to round robin."
        ),
    ] = "Act"
    window_seconds: Annotated[
        int, Meta(ge=5, le=3600, description="Arrivals of this long decide what brings how much load.")
    ] = 60


class ResourceRequirements(ApiStruct, frozen=True, kw_only=True):
    """CPU and memory of a container, as in a pod."""

    RULES = RESOURCE_RULES

    requests: Annotated[
        dict[str, Quantity], Meta(max_length=RESOURCES_MAX, description="Least amounts, by resource name.")
    ] = {}
    limits: Annotated[
        dict[str, Quantity], Meta(max_length=RESOURCES_MAX, description="Most amounts, by resource name.")
    ] = {}


class Picker(ApiStruct, frozen=True, kw_only=True):
    """The endpoint pickers of the pool: one Deployment, whose replicas all serve."""

    RULES = (MEMORY_HOLDS_A_BODY, NODE_LABELS, *TOLERATIONS)

    replicas: Annotated[
        int, Meta(ge=1, le=64, description="Pickers that run. They share their load; two or more survive one's end.")
    ] = 2
    image: Annotated[Image, Meta(description="Image; empty: the operator's default.")] = ""
    tls: Annotated[
        bool,
        Meta(description="Serve ext_proc with TLS (a self-signed certificate), as Gateway API gateways expect it."),
    ] = True
    stream_seconds_max: Annotated[
        int,
        Meta(
            ge=1,
            le=86400,
            description="The longest stream that a picker which is replaced waits for; its termination grace period"
            " is no shorter.",
        ),
    ] = 3600
    body_bytes_max: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="The largest request body; a larger one is answered with 413.")
    ] = 32 << 20
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least severe messages that are logged.")
    ] = "info"
    resources: Annotated[
        ResourceRequirements, Meta(description="CPU and memory of a picker; empty: sized for 64 endpoints.")
    ] = ResourceRequirements()
    node_selector: NodeSelector = {}
    tolerations: Tolerations = []
    priority_class_name: PriorityClass = ""


class Standalone(ApiStruct, frozen=True, kw_only=True):
    """An Envoy of the pool's own in front of it, for clusters without a Gateway API gateway."""

    RULES = (SERVICE_ANNOTATIONS, NODE_LABELS, *TOLERATIONS)

    enabled: Annotated[
        bool | None, Meta(description="Whether the pool has its own Envoy; null: the operator's default.")
    ] = None
    replicas: Annotated[int, Meta(ge=1, le=64, description="Envoys that run.")] = 2
    image: Annotated[Image, Meta(description="Image; empty: the operator's default.")] = ""
    port: Annotated[int, Meta(ge=1, le=65535, description="Port of the Envoy's Service, plain HTTP.")] = 80
    service_type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], Meta(description="Type of the Envoy's Service.")
    ] = "ClusterIP"
    service_annotations: Annotated[
        dict[str, Annotated[str, Meta(max_length=4096, description="Value of the annotation.")]],
        Meta(
            max_length=32,
            description="Annotations of the Envoy's Service, by which clouds are told what load balancer it wants.",
        ),
    ] = {}
    access_log: Annotated[bool, Meta(description="One JSON line per request on standard output.")] = False
    resources: Annotated[
        ResourceRequirements, Meta(description="CPU and memory of an Envoy; empty: one core's worth.")
    ] = ResourceRequirements()
    node_selector: NodeSelector = {}
    tolerations: Tolerations = []
    priority_class_name: PriorityClass = ""


class Sidecar(ApiStruct, frozen=True, kw_only=True):
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
        str,
        Meta(
            max_length=63,
            pattern=LABEL_OR_EMPTY,
            description="Container that runs the engine; empty: the one with the target port.",
        ),
    ] = ""
    kind: Annotated[
        Literal["Native", "Container"],
        Meta(description="Native: an init container that restarts (Kubernetes 1.29). Container: an ordinary one."),
    ] = "Native"
    image: Annotated[Image, Meta(description="Image; empty: the operator's default.")] = ""
    resources: Annotated[
        ResourceRequirements, Meta(description="CPU and memory of a sidecar; empty: 25m and 128Mi, at most 512Mi.")
    ] = ResourceRequirements()


class PolicySpec(ApiStruct, frozen=True, kw_only=True):
    """All that can be set about one pool."""

    RULES = (DISTINCT_CLASSES,)

    target_ref: Annotated[TargetRef, Meta(description=TargetRef.__doc__, extra_json_schema=_ATOMIC_MAP)]
    mode: Annotated[
        Mode,
        Meta(
            description="How endpoints are chosen. Auto: the least P-token x BS, and round robin while the fallback is"
            " active. Any other: that one, whatever the detectors say."
        ),
    ] = "Auto"
    batch_limit: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        Meta(
            description="Requests at which an endpoint is no candidate any more, until one of them has ended; null: no"
            " limit. Each picker knows of the others' requests some milliseconds late, so that those which come in the"
            " same moment may pass it."
        ),
    ] = None
    when_full: Annotated[WhenFull, Meta(description=WhenFull.__doc__)] = WhenFull()
    class_header: Annotated[
        HeaderName,
        Meta(
            description="Header by which a request names its class; empty: it cannot. The gateway must set or remove"
            " it, or a client chooses its class itself."
        ),
    ] = ""
    classes: Classes = []
    expert_costs: ExpertCosts = []
    network: Annotated[
        Network,
        Meta(
            description="Whether the way to an endpoint counts, as the prompt tokens that it would prefill meanwhile."
            " Annotation: where pods say so, by trimtab.dev/rtt-milliseconds. Measured: where they do not, the pickers"
            " measure it, by a connection every 5 s; where a mesh answers connections in the pods' place, that is"
            " nothing worth. An endpoint whose way is not known is as far as the middle one of the others."
        ),
    ] = "Off"
    log_above_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=100_000_000)] | None,
        Meta(
            description="Above so many tokens P counts with its logarithm: very long prompts then go less where tokens"
            " are fewest, and more where requests are; null: never."
        ),
    ] = None
    data_parallel_ranks: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None,
        Meta(description="Data-parallel ranks behind each target port; null: as the engine's arguments say."),
    ] = None
    hotspots: Annotated[Hotspots, Meta(description=Hotspots.__doc__)] = Hotspots()
    fallback: Annotated[Fallback, Meta(description=Fallback.__doc__)] = Fallback()
    picker: Annotated[Picker, Meta(description=Picker.__doc__)] = Picker()
    standalone: Annotated[Standalone, Meta(description=Standalone.__doc__)] = Standalone()
    sidecar: Annotated[Sidecar, Meta(description=Sidecar.__doc__)] = Sidecar()

    @classmethod
    def of(cls, spec: object) -> "PolicySpec":
        """From the API's JSON. Raises PolicyError, which names the field and the remedy."""
        schema = spec_schema()
        if found := list(faults(spec, schema, "spec")):
            raise PolicyError(found)
        read = msgspec.convert(readable(spec, schema), cls)
        if found := list(broken(read, "spec")):
            raise PolicyError(found)
        return read

    @classmethod
    def default(cls, pool_name: str) -> "PolicySpec":
        """Of a pool without a policy."""
        return cls(target_ref=TargetRef(name=pool_name))


class PolicyError(ValueError):
    """A policy that cannot be used: the text names the fields, what they should be, and what to do."""

    def __init__(self, faults: list[str]) -> None:
        more = len(faults) - FAULTS_SHOWN_MAX
        shown = faults[:FAULTS_SHOWN_MAX] + ([f"and {more} more"] if more > 0 else [])
        super().__init__(" | ".join(shown))
        self.faults = tuple(faults)
        """One text for each, `spec.field: expected this, got that; remedy`."""


@functools.cache
def spec_schema() -> Schema:
    """Of `spec`, as it stands in the CRD. Not to be changed by its readers."""
    return structural(PolicySpec)
