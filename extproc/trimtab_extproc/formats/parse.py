"""A request's headers, path and body as a `ParsedRequest`.

The one rule: whatever a client sends, this returns; what is not understood becomes `Kind.OTHER`, which is routed by
load and left for the engine to judge.
"""

from collections.abc import Callable, Mapping

from trimtab_extproc.formats.chat import parse_batch, parse_chat
from trimtab_extproc.formats.completions import parse_completion, parse_generate
from trimtab_extproc.formats.embeddings import parse_embeddings, parse_pooling, parse_score
from trimtab_extproc.formats.json_body import NotUnderstood
from trimtab_extproc.formats.messages import parse_messages
from trimtab_extproc.formats.model_name import model_in_form, model_in_json
from trimtab_extproc.formats.parsed_request import ParsedRequest
from trimtab_extproc.formats.responses import parse_responses
from trimtab_extproc.formats.routes import Route, route_of

PARSERS: dict[Route, Callable[[bytes], ParsedRequest]] = {
    Route.CHAT: parse_chat,
    Route.CHAT_BATCH: parse_batch,
    Route.COMPLETIONS: parse_completion,
    Route.GENERATE: parse_generate,
    Route.EMBEDDINGS: parse_embeddings,
    Route.POOLING: parse_pooling,
    Route.RESPONSES: parse_responses,
    Route.MESSAGES: parse_messages,
    Route.SCORE: parse_score,
}


def parse_request(method: str, path: str, headers: Mapping[str, str], body: bytes) -> ParsedRequest:
    """What the request asks for. Header names in lower case; never raises on what a client sent."""
    route, response_id = route_of(method, path)
    if response_id is not None:
        return ParsedRequest(response_id=response_id)
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        # The engine does not unpack bodies either.
        return ParsedRequest(reason="encoding")
    if media_type not in ("", "application/json") and not media_type.endswith("+json"):
        model = model_in_form(body) if media_type == "multipart/form-data" else None
        return ParsedRequest(model=model, reason="content_type")
    parser = PARSERS.get(route)
    if parser is None:
        return ParsedRequest(model=model_in_json(body), reason="path")
    try:
        return parser(body)
    except NotUnderstood as refusal:
        return ParsedRequest(model=refusal.model or model_in_json(body), reason=refusal.reason)
