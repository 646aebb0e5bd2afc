"""The envelope that vLLM and SGLang put their KV cache events in: msgpack of `[time, [event, ...], rank]`.

The one rule: one bad event spoils no other. What cannot be read is counted and left out; only a payload that is no
batch at all raises. What an event's fields mean is the adapters' business, not this module's.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from trimtab_sidecar.engine_events import EngineEvent, EventBatch, EventFormatError

COUNT_MAX = 2**20
"""Of tokens in a block, and of an index, in an event."""
Fields = Mapping[str, object]
Reader = Callable[[Fields], tuple[EngineEvent | None, int]]
"""From an event's named fields to the event (None: nothing to tell) and the number of blocks refused."""

_decoder = msgspec.msgpack.Decoder()


def decode_batch(payload: bytes, positions: Mapping[str, Sequence[str]], readers: Mapping[str, Reader]) -> EventBatch:
    """The events of one payload. Raises `EventFormatError` if it is no batch.

    `positions` names the fields of positional events, by event type; `readers` has a reader for each known type.
    """
    try:
        envelope = _decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        raise EventFormatError("the payload is not msgpack") from error
    if not isinstance(envelope, list) or len(envelope) < 2 or not isinstance(envelope[1], list):
        raise EventFormatError("the payload is no batch of events")
    time_s, rank = envelope[0], envelope[2] if len(envelope) > 2 else None
    events: list[EngineEvent] = []
    undecodable = unknown = refused = 0
    uncertain = False
    for raw in envelope[1]:
        kind = ""
        try:
            kind, fields = named_fields(raw, positions)
            reader = readers.get(kind)
            if reader is None:
                unknown += 1
                continue
            event, refused_blocks = reader(fields)
        except EventFormatError:
            undecodable += 1
            uncertain = uncertain or kind != "BlockStored"
            continue
        refused += refused_blocks
        if event is not None:
            events.append(event)
    return EventBatch(
        events=tuple(events),
        time_s=float(time_s) if isinstance(time_s, int | float) else 0.0,
        rank=rank if type(rank) is int else None,
        undecodable=undecodable,
        removals_uncertain=uncertain,
        unknown=unknown,
        refused_blocks=refused,
    )


def named_fields(raw: object, positions: Mapping[str, Sequence[str]]) -> tuple[str, Fields]:
    """An event's type and its fields by name, from a map `{"type": ...}` or a positional array `[type, ...]`.

    Fields were only ever appended, so a position means the same in every release; more of them than we know are
    passed over. A map at the end of an array holds named fields (SGLang adds its salt so).
    """
    if isinstance(raw, dict):
        kind = raw.get("type")
        if not isinstance(kind, str):
            raise EventFormatError("an event without a type")
        return kind, raw
    if not isinstance(raw, list) or not raw or not isinstance(raw[0], str):
        raise EventFormatError("an event that is neither map nor tagged array")
    fields: dict[str, object] = {}
    values = raw[1:]
    if values and isinstance(values[-1], dict):
        fields.update((name, value) for name, value in values.pop().items() if isinstance(name, str))
    fields.update(zip(positions.get(raw[0], ()), values, strict=False))
    return raw[0], fields


def text_field(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise EventFormatError(f"{name} is not text")


def integer_field(fields: Fields, name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is int and 0 <= value <= COUNT_MAX:
        return value
    raise EventFormatError(f"{name} is not a count")
