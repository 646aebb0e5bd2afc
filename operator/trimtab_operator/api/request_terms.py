"""What a SchedulingPolicy says of requests: their classes, the experts behind them, the way to the endpoints, and what
happens when every endpoint is full.

The one rule: everything here is off by default, and changes nothing while it is.
"""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from trimtab_operator.api.api_struct import ApiStruct
from trimtab_operator.api.patterns import HEADER_OR_EMPTY, SUBDOMAIN
from trimtab_operator.api.rules import Rule
from trimtab_state.request_class import CLASSES_MAX, EXPERTS_MAX, NAMES_MAX, PRIORITY_MAX, RUNS_MAX

ATOMIC_LIST: Final = {"x-kubernetes-list-type": "atomic"}
ENDPOINT_EXPERTS_MAX: Final = 64
Action = Literal["Reject", "Wait"]
Network = Literal["Off", "Annotation", "Measured"]
HeaderName = Annotated[str, Meta(max_length=128, pattern=HEADER_OR_EMPTY)]
ExpertNumber = Annotated[int, Meta(ge=0, le=EXPERTS_MAX - 1)]

RISING: Final = Rule(
    field=".last",
    needs=("first", "last"),
    cel="self.first <= self.last",
    message="expected no smaller number than first; correct one of them",
    holds=lambda run: run.first <= run.last,
)


def _are_distinct(spec: Any) -> bool:
    names = [request_class.name for request_class in spec.classes]
    return len(set(names)) == len(names)


DISTINCT_CLASSES: Final = Rule(
    field=".classes",
    needs=("classes",),
    cel="self.classes.all(c, self.classes.exists_one(d, d.name == c.name))",
    message="expected each name once; rename one of the classes, or remove it",
    holds=_are_distinct,
)


class WhenFull(ApiStruct, frozen=True, kw_only=True):
    """What becomes of a request when every endpoint that could take it is at `batchLimit`."""

    action: Annotated[
        Action,
        Meta(
            description="Reject: 429 with Retry-After, at once. Wait: it waits in the picker until an endpoint is free,"
            " and has 429 when its time is over. Without a batchLimit no endpoint is ever full."
        ),
    ] = "Reject"
    wait_seconds: Annotated[
        int,
        Meta(
            ge=1,
            le=120,
            description="How long a request may wait. A gateway's ext_proc message timeout must be longer: our own"
            " Envoys' is made so, and a longer wait holds when all of them are replaced; for others GatewayAttached"
            " says what to set.",
        ),
    ] = 5
    requests_max: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Requests that wait in one picker, with their bodies; more are refused at once. When it is"
            " full, the newest request of the tenant with the most gives way to one of a tenant with fewer.",
        ),
    ] = 256
    tenant_header: Annotated[
        HeaderName,
        Meta(
            description="Header that names who asks; tenants that wait have their turns one after the other, however"
            " many requests each has. Empty: x-gateway-inference-fairness-id. The gateway must set or remove it:"
            " a client that may send it has as many turns as it has names."
        ),
    ] = ""


class ExpertShare(ApiStruct, frozen=True, kw_only=True):
    """Experts in a row that a class of requests is likely to use."""

    RULES = (RISING,)

    first: Annotated[ExpertNumber, Meta(description="The first expert.")]
    last: Annotated[ExpertNumber, Meta(description="The last expert, itself included.")]
    share: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="How much of the class's picks fall on these experts together, evenly; relative to the shares"
            " of its other entries.",
        ),
    ]


class ExpertCost(ApiStruct, frozen=True, kw_only=True):
    """Experts in a row, and how slow each of them is on some endpoints."""

    RULES = (RISING,)

    first: Annotated[ExpertNumber, Meta(description="The first expert.")]
    last: Annotated[ExpertNumber, Meta(description="The last expert, itself included.")]
    percent: Annotated[
        int, Meta(ge=1, le=10_000, description="Time of a token, in percent of what it takes where experts are even.")
    ]


class EndpointExperts(ApiStruct, frozen=True, kw_only=True):
    """What experts cost on some endpoints, in place of what their sidecars say."""

    endpoints: Annotated[
        list[
            Annotated[
                str, Meta(min_length=1, max_length=253, description="Name of a pod, or ip:port, or ip:port/rank.")
            ]
        ],
        Meta(max_length=NAMES_MAX, description="The endpoints.", extra_json_schema=ATOMIC_LIST),
    ]
    costs: Annotated[
        list[Annotated[ExpertCost, Meta(description=ExpertCost.__doc__)]],
        Meta(
            max_length=RUNS_MAX,
            description="Experts that are slower or faster than 100 percent there; of an expert that is in several the"
            " last counts.",
            extra_json_schema=ATOMIC_LIST,
        ),
    ] = []


class RequestClass(ApiStruct, frozen=True, kw_only=True):
    """Requests that count alike. A request is of the class that `classHeader` names, else of the first that lists its
    InferenceObjective (header x-gateway-inference-objective), else of the first that lists its model."""

    name: Annotated[
        str, Meta(min_length=1, max_length=63, pattern=SUBDOMAIN, description="Name, as `classHeader` has it.")
    ]
    weight_percent: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="How much a request of the class weighs on its endpoint for all that come after it, in percent"
            " of an ordinary one. At 400 the endpoint looks as full as with four ordinary ones.",
        ),
    ] = 100
    priority: Annotated[
        Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None,
        Meta(
            description="Which of the requests that wait for a place at a full pool goes first: the highest. Below 0"
            " they do not wait but are refused. Null: as the request's InferenceObjective says, and 0 without one.",
        ),
    ] = None
    objectives: Annotated[
        list[
            Annotated[
                str,
                Meta(min_length=1, max_length=253, pattern=SUBDOMAIN, description="Name of an InferenceObjective."),
            ]
        ],
        Meta(
            max_length=NAMES_MAX,
            description="InferenceObjectives of the class, whether the cluster has such objects or not. What the class"
            " says of priority goes before what they say.",
            extra_json_schema=ATOMIC_LIST,
        ),
    ] = []
    models: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256, description="Name of a model, as requests have it.")]],
        Meta(max_length=NAMES_MAX, description="Models of the class.", extra_json_schema=ATOMIC_LIST),
    ] = []
    experts: Annotated[
        list[Annotated[ExpertShare, Meta(description=ExpertShare.__doc__)]],
        Meta(
            max_length=RUNS_MAX,
            description="Experts that the class is likely to use, of a mixture-of-experts model. An endpoint where they"
            " are slow counts the class's tokens as so many more. Empty: experts are not looked at.",
            extra_json_schema=ATOMIC_LIST,
        ),
    ] = []


Classes = Annotated[
    list[Annotated[RequestClass, Meta(description=RequestClass.__doc__)]],
    Meta(max_length=CLASSES_MAX, description="Classes of requests.", extra_json_schema=ATOMIC_LIST),
]
ExpertCosts = Annotated[
    list[Annotated[EndpointExperts, Meta(description=EndpointExperts.__doc__)]],
    Meta(
        max_length=ENDPOINT_EXPERTS_MAX,
        description="What experts cost on endpoints; of an endpoint that is in several the first counts.",
        extra_json_schema=ATOMIC_LIST,
    ),
]
