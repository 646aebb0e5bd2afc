"""What the operator says about a pool in its SchedulingPolicy's status, and the definition of that schema.

The one rule: everything here is told by the operator alone and can be told again from what it sees; nothing is read
back from it. Times are UTC, as RFC 3339 texts. A field that is UNSET is left out.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from trimtab_operator.api.api_struct import ApiStruct

ActivePolicy = Literal["Product", "RoundRobin", "LeastRequest"]
ConditionStatus = Literal["True", "False", "Unknown"]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]

CONDITIONS_MAX: Final = 32


class Condition(ApiStruct, frozen=True, kw_only=True):
    """One thing that holds of the policy, or does not, and why."""

    type: Annotated[
        str,
        Meta(
            max_length=316,
            pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
            r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
            description="Which condition this is.",
        ),
    ]
    status: Annotated[ConditionStatus, Meta(description="Whether it holds.")]
    reason: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=1024,
            pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            description="The reason in one word, for programs.",
        ),
    ]
    message: Annotated[str, Meta(max_length=32768, description="The reason and the remedy in words.")]
    last_transition_time: Annotated[Time, Meta(description="When `status` last became what it is.")]
    observed_generation: Annotated[
        Annotated[int, Meta(ge=0)] | UnsetType,
        Meta(description="The policy's `metadata.generation` that it speaks of. Behind that: out of date."),
    ] = UNSET


class EndpointCounts(ApiStruct, frozen=True, kw_only=True):
    """Endpoints of the pool: each target port (and data-parallel rank) of each pod that the selector matches."""

    ready: Annotated[Count, Meta(description="Those that may be chosen: their pod is ready and not being deleted.")] = 0
    total: Annotated[Count, Meta(description="All of them.")] = 0


class InjectionCounts(ApiStruct, frozen=True, kw_only=True):
    """Pods of the pool with and without the sidecar."""

    pods: Annotated[Count, Meta(description="Pods that have the sidecar.")] = 0
    not_injected: Annotated[
        Count,
        Meta(description="Pods that should have it and do not. They are routed to by load alone; restart them."),
    ] = 0


class PickerCounts(ApiStruct, frozen=True, kw_only=True):
    """The pickers of the pool."""

    ready: Annotated[Count, Meta(description="Pickers that answer.")] = 0
    total: Annotated[Count, Meta(description="Pickers that there are to be.")] = 0
    shown: Annotated[str, Meta(max_length=32, description="Both in one, for lists: `1/2`.")] = ""
    version: Annotated[
        str,
        Meta(
            max_length=512,
            description="What those that are ready run, by their image's tag or digest; `A -> B` where B is wanted.",
        ),
    ] = ""


class ModelCards(ApiStruct, frozen=True, kw_only=True):
    """How exactly the pool's endpoints are known to the pickers."""

    exact: Annotated[Count, Meta(description="Endpoints whose cache is known, chunk by chunk.")] = 0
    approximate: Annotated[
        Count, Meta(description="Endpoints whose cache is guessed from what was sent there: approximate mode.")
    ] = 0
    reason: Annotated[
        str, Meta(max_length=1024, description="Why endpoints are in approximate mode; empty where none is.")
    ] = ""


class PolicyStatus(ApiStruct, frozen=True, kw_only=True):
    """How the pool that the policy is for runs."""

    observed_generation: Annotated[
        Annotated[int, Meta(ge=0)] | UnsetType,
        Meta(description="The policy's `metadata.generation` that this status speaks of. Behind that: out of date."),
    ] = UNSET
    pool: Annotated[
        str, Meta(max_length=253, description="Name of the InferencePool that the policy is in force for; empty: none.")
    ] = ""
    installation: Annotated[
        Annotated[str, Meta(max_length=63)] | UnsetType,
        Meta(description="Namespace of the Trimtab installation that runs the pool: others leave it alone."),
    ] = UNSET
    active_policy: Annotated[
        ActivePolicy | UnsetType,
        Meta(description="How endpoints are chosen, as the pickers were told last: the mode, or the fallback."),
    ] = UNSET
    active_since: Annotated[Time | UnsetType, Meta(description="Since when they are chosen so.")] = UNSET
    endpoints: Annotated[EndpointCounts | UnsetType, Meta(description=EndpointCounts.__doc__)] = UNSET
    injected: Annotated[InjectionCounts | UnsetType, Meta(description=InjectionCounts.__doc__)] = UNSET
    pickers: Annotated[PickerCounts | UnsetType, Meta(description=PickerCounts.__doc__)] = UNSET
    model_cards: Annotated[ModelCards | UnsetType, Meta(description=ModelCards.__doc__)] = UNSET
    conditions: Annotated[
        list[Condition],
        Meta(
            max_length=CONDITIONS_MAX,
            description="What holds of the policy and its pool, one entry per type.",
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = msgspec.field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """As JSON, for the object's `status`."""
        body: dict[str, Any] = msgspec.to_builtins(self)
        return body
