"""Parts of a pool's policy in the control document that act on requests: classes, experts, and what happens when all
endpoints are full.

The one rule: as in `documents`: readers ignore what they do not know, and every field has a default that changes
nothing.
"""

from typing import Annotated

import msgspec

from trimtab_core.extra_terms import ORDINARY_MILLI, WEIGHT_MILLI_MAX

OBJECTIVE_HEADER = "x-gateway-inference-objective"
"""Names the InferenceObjective of a request, as the Gateway API Inference Extension has it."""
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
"""Names who asks, likewise."""
CLASSES_MAX = 16
EXPERTS_MAX = 1_024
"""Experts of a model that are told apart."""
RUNS_MAX = 64
"""Runs of experts in one list."""
NAMES_MAX = 64
"""Models, objectives or endpoints in one list."""
COST_MILLI_MAX = 100_000
SHARE_MAX = 1_000_000
WAIT_S_MAX = 120.0
WAITING_MAX = 100_000
PRIORITY_MAX = 1_000_000
OBJECTIVES_MAX = 256
"""InferenceObjectives of a pool whose priorities count."""
OBJECTIVE_PRIORITY_MAX = 2**53
"""The standard sets no bound: what is beyond this, every reader of JSON's, is taken as this."""
Expert = Annotated[int, msgspec.Meta(ge=0, lt=EXPERTS_MAX)]
CostMilli = Annotated[int, msgspec.Meta(ge=1, le=COST_MILLI_MAX)]
"""How many times longer a token takes through an expert than where all experts are balanced, in thousandths."""
Word = Annotated[str, msgspec.Meta(max_length=256)]
Words = Annotated[tuple[Word, ...], msgspec.Meta(max_length=NAMES_MAX)]


class ExpertShare(msgspec.Struct, frozen=True, kw_only=True):
    """Experts in a row, and how much of a class's picks falls on them all together, evenly."""

    first: Expert
    last: Expert
    share: Annotated[int, msgspec.Meta(ge=0, le=SHARE_MAX)]
    """Of the sum of all shares of the class."""


class ExpertCost(msgspec.Struct, frozen=True, kw_only=True):
    """Experts in a row, and what each of them costs on an endpoint."""

    first: Expert
    last: Expert
    cost_milli: CostMilli


class EndpointExperts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What experts cost on some endpoints; those that are not named cost 1."""

    endpoints: Words = ()
    """Names of endpoints, their addresses, or their pods' names."""
    costs: Annotated[tuple[ExpertCost, ...], msgspec.Meta(max_length=RUNS_MAX)] = ()
    """Of an expert that is in several runs the last counts."""


class RequestClass(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that count alike."""

    name: Word
    weight_milli: Annotated[int, msgspec.Meta(ge=1, le=WEIGHT_MILLI_MAX)] = ORDINARY_MILLI
    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    """Among those who wait for a place the highest goes first; below 0 it does not wait. None: the class says nothing
    of it."""
    objectives: Words = ()
    """Names of InferenceObjectives."""
    models: Words = ()
    experts: Annotated[tuple[ExpertShare, ...], msgspec.Meta(max_length=RUNS_MAX)] = ()
    """The experts that its tokens are sent to; empty: all alike."""


class Objective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An InferenceObjective of the pool, as the cluster has it."""

    name: Word
    priority: Annotated[int, msgspec.Meta(ge=-OBJECTIVE_PRIORITY_MAX, le=OBJECTIVE_PRIORITY_MAX)] = 0


class Overflow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What becomes of a request for which every endpoint is at its limit."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = 0.0
    """How long it may wait for a place in the picker; 0: it is refused at once."""
    waiting_max: Annotated[int, msgspec.Meta(ge=1, le=WAITING_MAX)] = 256
    """Requests that wait in one picker."""
    tenant_header: Word = ""
    """Header that names who asks; those who wait have their turns tenant by tenant. Empty: the gateway's own."""
