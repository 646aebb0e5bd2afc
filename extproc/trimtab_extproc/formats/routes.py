"""Which format a path stands for.

The one rule: the end of the path decides, so that a gateway's prefix (`/llm/v1/chat/completions`) does not matter;
query, fragment, doubled and trailing slashes do not count. A path that nobody knows is `Route.OTHER`, never an error.
"""

from enum import Enum
from functools import lru_cache


class Route(Enum):
    """The formats of a body."""

    CHAT = "chat"
    CHAT_BATCH = "chat_batch"
    COMPLETIONS = "completions"
    GENERATE = "generate"
    """Token ids in, tokens out: vLLM's `/inference/v1/generate`."""
    EMBEDDINGS = "embeddings"
    POOLING = "pooling"
    RESPONSES = "responses"
    RESPONSE_BY_ID = "response_by_id"
    MESSAGES = "messages"
    SCORE = "score"
    OTHER = "other"


PATH_BYTES_MAX = 4_096
"""A longer path is `Route.OTHER`."""
RESPONSE_ID_CHARS_MAX = 256
"""A longer id in a path is no response id."""

BY_ENDING: dict[tuple[str, ...], Route] = {
    ("chat", "completions"): Route.CHAT,
    ("chat", "completions", "batch"): Route.CHAT_BATCH,
    ("v1", "completions"): Route.COMPLETIONS,
    ("inference", "v1", "generate"): Route.GENERATE,
    ("v1", "embeddings"): Route.EMBEDDINGS,
    ("pooling",): Route.POOLING,
    ("v1", "responses"): Route.RESPONSES,
    ("v1", "messages"): Route.MESSAGES,
    ("score",): Route.SCORE,
    ("rerank",): Route.SCORE,
}
"""The last segments of a path, the longest ending first in force."""
ENDING_SEGMENTS_MAX = max(len(ending) for ending in BY_ENDING)

ROUTES_MAX = 1_024
"""Methods and paths whose answer is kept."""

RESPONSE_ACTIONS = frozenset({"cancel", "input_items"})
"""What may follow a response's id."""
NO_RESPONSE_IDS = frozenset({"render", "compact", "input_tokens"})
"""What stands in an id's place without being one."""


def route_of(method: str, path: str) -> tuple[Route, str | None]:
    """The format of `method path`, and the response id that the path names."""
    if len(path) > PATH_BYTES_MAX:
        return Route.OTHER, None
    return _route(method, path)


@lru_cache(ROUTES_MAX)
def _route(method: str, path: str) -> tuple[Route, str | None]:
    bare = path.partition("?")[0].partition("#")[0]
    if "://" in bare:
        bare = bare.partition("://")[2].partition("/")[2]
    segments = [segment for segment in bare.split("/") if segment]
    if response_id := _response_id(segments):
        return Route.RESPONSE_BY_ID, response_id
    if method.upper() != "POST":
        return Route.OTHER, None
    for count in range(min(ENDING_SEGMENTS_MAX, len(segments)), 0, -1):
        if route := BY_ENDING.get(tuple(segments[-count:])):
            return route, None
    return Route.OTHER, None


def _response_id(segments: list[str]) -> str | None:
    """The id in `.../v1/responses/{id}` or `.../v1/responses/{id}/{action}`."""
    if segments and segments[-1] in RESPONSE_ACTIONS:
        segments = segments[:-1]
    if len(segments) < 3 or segments[-3:-1] != ["v1", "responses"]:
        return None
    name = segments[-1]
    if name in NO_RESPONSE_IDS or name in RESPONSE_ACTIONS or len(name) > RESPONSE_ID_CHARS_MAX:
        return None
    return name
