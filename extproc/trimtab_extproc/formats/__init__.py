"""Request formats: what a client's request means for choosing an endpoint, and what the response tells on its way.

The one rule: nothing here does I/O, and nothing raises on what a client or an engine sends. `parse_request` reads a
request once; `rendering_for` gives its prompts as chunk chains, once for each distinct model card among the candidates;
`ResponseReader` follows a response body.
"""

from trimtab_extproc.formats.parse import parse_request
from trimtab_extproc.formats.parsed_request import (
    ChatSource,
    Kind,
    OpaqueSource,
    ParsedRequest,
    Source,
    TextSource,
    TokenSource,
)
from trimtab_extproc.formats.prompts import Rendering, prompts_for, rendering_for
from trimtab_extproc.formats.response_reader import ResponseReader

__all__ = [
    "ChatSource",
    "Kind",
    "OpaqueSource",
    "ParsedRequest",
    "Rendering",
    "ResponseReader",
    "Source",
    "TextSource",
    "TokenSource",
    "parse_request",
    "prompts_for",
    "rendering_for",
]
