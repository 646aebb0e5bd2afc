"""The documents of the shared state: what the operator and the sidecars tell the replicas.

The one rule: readers ignore fields that they do not know and writers give every new field a default, so that versions
may be mixed during a rollout. Nothing here holds text of prompts.
"""

from typing import Annotated, Literal, TypeVar

import msgspec

from .errors import CodecError
from .request_class import (
    CLASSES_MAX,
    EXPERTS_MAX,
    OBJECTIVES_MAX,
    CostMilli,
    EndpointExperts,
    Expert,
    Objective,
    Overflow,
    RequestClass,
    Word,
)
from .wire import TEXT_BYTES_MAX

EndpointState = Literal["serving", "draining", "asleep", "unreachable"]
PolicyName = Literal["product", "round_robin", "least_request"]
NetworkTerm = Literal["off", "annotation", "measured"]
"""Whether round trips count: not at all, those that pods are annotated with, or those that each picker measures too."""
HotspotMode = Literal["off", "alarm", "act"]
"""What the pickers' hotspot detectors do: nothing, raise alarms, or leave out a class's holders too."""
FallbackStage = Literal["off", "watching", "active"]
"""`off`: the policy is what was asked for, whatever the detectors say. `watching`: the product, until alarms keep
firing. `active`: round robin, because they did."""
T = TypeVar("T")

DOCUMENT_BYTES_MAX = 16 * 1024 * 1024
"""A larger document is refused as malformed."""
COUNT_MAX = 2**53
"""Of a number in a document: what every reader of JSON can hold, and sums of which fit in 64 bits."""
BLOCK_TOKENS_MAX = 2**20
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=TEXT_BYTES_MAX)]
"""Of an endpoint or an epoch: no longer than the logs take it."""
PrefixClass = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""A chunk hash as 16 hex digits: many readers of JSON have no integers of 64 bits."""


class EndpointSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One endpoint of a pool: a pod's port, or one data-parallel rank behind it."""

    name: Name
    """`ip:port`, or `ip:port/rank`: the endpoint's name everywhere."""
    address: Name
    """`ip:port` as the gateway dials it."""
    rank: int | None = None
    """Data-parallel rank, None where the port has but one engine."""
    pod: str = ""
    """Name of the pod, for people."""
    zone: str = ""
    engine: str = ""
    """`vllm` or `sglang`, empty if unknown."""
    gpu: str = ""
    """Kind of accelerator, for people."""
    rtt_s: Annotated[float, msgspec.Meta(ge=0, le=60)] | None = None
    """Round trip to it as its pod is annotated, None: not said."""
    draining: bool = False
    """The pod is being deleted: finish what it has, send nothing new."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a pool's requests are placed."""

    policy: PolicyName = "product"
    reason: str = ""
    """Why the policy differs from what was asked for, empty if it does not."""
    batch_limit: Count | None = None
    """Requests at which an endpoint is no candidate any more, None: no limit."""
    fallback: FallbackStage = "off"
    """What the fallback does. With `since_s`, all that an operator which starts again needs to go on."""
    since_s: float = 0.0
    """Unix time at which this policy and stage began; 0: not known."""
    hotspots: HotspotMode = "act"
    hotspot_window_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """How long the detectors count an arrival."""
    overflow: Overflow = Overflow()
    log_above_tokens: Count = 0
    """P grows with its logarithm above this; 0: never."""
    network: NetworkTerm = "off"
    class_header: Word = ""
    """Header by which a request names its class; empty: it cannot."""
    classes: Annotated[tuple[RequestClass, ...], msgspec.Meta(max_length=CLASSES_MAX)] = ()
    objectives: Annotated[tuple[Objective, ...], msgspec.Meta(max_length=OBJECTIVES_MAX)] = ()
    """The pool's InferenceObjectives, in the order of their names."""
    expert_costs: Annotated[tuple[EndpointExperts, ...], msgspec.Meta(max_length=64)] = ()
    """In place of what the sidecars of these endpoints say."""


class ControlDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the operator says about a pool: its members and its policy."""

    namespace: str
    name: str
    version: int = 0
    """Grows with each change; set by the writer."""
    endpoints: tuple[EndpointSpec, ...] = ()
    policy: Policy = Policy()


class ServedModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One name under which an engine serves."""

    card: str | None = None
    """Digest of its model card, None: no card, so approximate."""
    lora: bool = False


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sidecar says about its engine, every second or so and at once when the state changes."""

    endpoint: Name
    epoch: Name
    """Names one lifetime of the engine process."""
    state: EndpointState = "serving"
    running: Count = 0
    waiting: Count = 0
    kv_usage: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    kv_capacity_tokens: Count = 0
    block_tokens: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_TOKENS_MAX)] = 16
    models: dict[str, ServedModel] = {}
    approximate: str | None = None
    """Why its index cannot be exact, None if it is."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    tokens_per_byte: float = 0.0
    """As measured in the blocks that the engine stored; 0 until there are enough of them."""
    expert_costs: Annotated[dict[Expert, CostMilli], msgspec.Meta(max_length=EXPERTS_MAX)] = {}
    """What each expert costs there, as the engine says; those that are not named cost 1."""
    seed_digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Of the seed of its chunk hashes: one that is not the pickers' comes of another secret, and none of its hashes is
    ever found. Empty: a sidecar that does not say."""
    incarnation: int = 0
    """Of the sidecar process. Set by the publisher, as are the two below."""
    sequence: int = 0
    """The sidecar's position in the KV log."""
    beat: int = 0
    """Counts the heartbeats of this incarnation."""


class Alarm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A hotspot alarm of one replica about one prefix class.

    It has no time of its own: the stream's entry has one, by the store's clock, which all replicas share.
    """

    prefix_class: PrefixClass
    """Keyed hash of the class's deepest common chunk."""
    raised: bool = True
    """False: the alarm is over. Told for people's sake; it needs no answer."""
    acted: bool = False
    """True: the holders were taken out of the candidates for the class."""
    holders: Count = 0
    """`|M|`, endpoints that hold the prefix."""
    others: Count = 0
    """`|M'|`, the rest."""
    in_class: Count = 0
    """Arrivals of the class in the window."""
    arrivals: Count = 0
    """All arrivals in the window."""
    window_s: float = 0.0
    """Length of the window."""
    replica: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Incarnation of the replica, 16 hex digits."""


_control_decoder = msgspec.json.Decoder(ControlDocument)
_heartbeat_decoder = msgspec.json.Decoder(Heartbeat)
_alarm_decoder = msgspec.json.Decoder(Alarm)


def encode(document: ControlDocument | Heartbeat | Alarm) -> bytes:
    """The document as JSON, readable with any client of the store."""
    return msgspec.json.encode(document)


def decode_control(data: bytes) -> ControlDocument:
    """Raises CodecError."""
    return _decode(_control_decoder, data)


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Raises CodecError."""
    return _decode(_heartbeat_decoder, data)


def decode_alarm(data: bytes) -> Alarm:
    """Raises CodecError."""
    return _decode(_alarm_decoder, data)


def _decode(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T:
    if len(data) > DOCUMENT_BYTES_MAX:
        raise CodecError(f"document of {len(data)} bytes, at most {DOCUMENT_BYTES_MAX}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"malformed document: {error}") from error
