"""Paths and the formats that they stand for."""

import pytest

from trimtab_extproc.formats.routes import PATH_BYTES_MAX, RESPONSE_ID_CHARS_MAX, Route, route_of


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", Route.CHAT),
        ("/v1/chat/completions/", Route.CHAT),
        ("//v1//chat/completions", Route.CHAT),
        ("/v1/chat/completions?x=/v1/completions", Route.CHAT),
        ("/v1/chat/completions#top", Route.CHAT),
        ("/team/a/llm/v1/chat/completions", Route.CHAT),
        ("/openai/deployments/m/chat/completions", Route.CHAT),
        ("http://host:80/v1/chat/completions", Route.CHAT),
        ("/v1/chat/completions/batch", Route.CHAT_BATCH),
        ("/v1/completions", Route.COMPLETIONS),
        ("/x/v1/completions?a", Route.COMPLETIONS),
        ("/inference/v1/generate", Route.GENERATE),
        ("/v1/embeddings", Route.EMBEDDINGS),
        ("/pooling", Route.POOLING),
        ("/v1/responses", Route.RESPONSES),
        ("/v1/responses/", Route.RESPONSES),
        ("/v1/messages", Route.MESSAGES),
        ("/anthropic/v1/messages", Route.MESSAGES),
        ("/v1/score", Route.SCORE),
        ("/v2/rerank", Route.SCORE),
        ("/v1/messages/count_tokens", Route.OTHER),
        ("/v1/chat/completions/render", Route.OTHER),
        ("/tokenize", Route.OTHER),
        ("/v1/audio/transcriptions", Route.OTHER),
        ("/completions", Route.OTHER),
        ("/v1/models", Route.OTHER),
        ("/v1/responses/render", Route.OTHER),
        ("/", Route.OTHER),
        ("", Route.OTHER),
        ("*", Route.OTHER),
        ("/V1/Chat/Completions", Route.OTHER),
        ("/v1/chat/completions" + "/" * PATH_BYTES_MAX, Route.OTHER),
    ],
)
def test_the_end_of_the_path_gives_the_format(path: str, route: Route) -> None:
    assert route_of("POST", path) == (route, None)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "", "PUT"])
def test_only_a_post_carries_a_prompt(method: str) -> None:
    assert route_of(method, "/v1/chat/completions") == (Route.OTHER, None)


@pytest.mark.parametrize(
    ("method", "path", "response_id"),
    [
        ("GET", "/v1/responses/resp_1", "resp_1"),
        ("GET", "/v1/responses/resp_1/?stream=true&starting_after=3", "resp_1"),
        ("POST", "/v1/responses/resp_1/cancel", "resp_1"),
        ("DELETE", "/v1/responses/resp_1", "resp_1"),
        ("GET", "/a/v1/responses/resp_1/input_items", "resp_1"),
        ("GET", "/v1/responses/my-own-id", "my-own-id"),
        ("POST", "/v1/responses/cancel", None),
        ("POST", "/v1/responses/compact", None),
        ("GET", "/v1/responses/" + "x" * (RESPONSE_ID_CHARS_MAX + 1), None),
        ("GET", "/v1/responses", None),
    ],
)
def test_a_path_may_name_a_response(method: str, path: str, response_id: str | None) -> None:
    assert route_of(method, path)[1] == response_id
