"""The filter that asks the pickers, and what goes with it: as few messages for each request as will do.

Its one rule: a request waits for a picker once. One whose body is announced by its length is shown whole, the headers
that pickers read as attributes beside it; one without a body, or with one of unknown length, is shown headers first. A
response is told only if it is not the usual one: no 2xx, from another endpoint than the chosen one, or wanted by the
picker, which then does not say what it expects.

The request's headers must not pass the filter before its choice, or they would be routed without it: where they are not
shown first, a buffer behind the filter holds them until all of the body is there. The choice then goes by metadata
alone, and a route turns it into headers again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import betterproto2
from envoy_data_plane.envoy.config.core.v3 import (
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.config.core.v3 import RetryPolicy as GrpcRetryPolicy
from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig as EnvoyExtensionConfig
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher, Route, RouteAction, RouteMatch
from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.extensions.filters.http.buffer.v3 import Buffer, BufferPerRoute
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ExtProcOverrides,
    ExtProcPerRoute,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import (
    HttpResponseStatusCodeClassMatchInput,
    RegexMatcher,
    StringMatcher,
)
from envoy_data_plane.google.protobuf import Any
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherList,
    MatcherMatcherListFieldMatcher,
    MatcherMatcherListPredicate,
    MatcherMatcherListPredicatePredicateList,
    MatcherMatcherListPredicateSinglePredicate,
    MatcherOnMatch,
)
from envoy_data_plane.xds.type.matcher.v3 import StringMatcher as ValueMatcher

from trimtab_operator.envoy.cel import attribute, equal, holds, item
from trimtab_operator.envoy.clusters import DESTINATION, LB_NAMESPACE, PICKER_CLUSTER
from trimtab_operator.envoy.front import EnvoyFront

EXT_PROC: Final = "envoy.filters.http.ext_proc"
BUFFER: Final = "envoy.filters.http.buffer"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
"""Filter metadata by which a gateway limits the choice; passed on to the picker, never taken from a client."""
RANK_HEADER: Final = "x-data-parallel-rank"
EXPECTED_KEY: Final = "trimtab.expected-endpoint"
"""Metadata by which a picker says which endpoint's answer it need not be told of."""
USUAL_UNTOLD: Final = "'trimtab.usual-response-untold'"
"""An attribute, a constant, that tells pickers that we heed it: no word of a response means that it was the usual."""
REQUEST_ATTRIBUTES: Final = (
    "request.method",
    "request.path",
    "request.id",
    "request.headers['content-type']",
    "request.headers['content-encoding']",
    USUAL_UNTOLD,
)
RESPONSE_ATTRIBUTES: Final = ("upstream.address", "upstream.request_attempt_count", "response.code")

_SEND: Final = ProcessingModeHeaderSendMode.SEND
_SKIP: Final = ProcessingModeHeaderSendMode.SKIP


def picker_filters(front: EnvoyFront) -> list[HttpFilter]:
    """The filters before the router."""
    ask = ExtensionWithMatcher(
        extension_config=EnvoyExtensionConfig(name=EXT_PROC, typed_config=Any.pack(_processor(front))),
        xds_matcher=_skip_usual_responses(),
    )
    buffer = Buffer(max_request_bytes=front.body_bytes_max)
    return [
        HttpFilter(name=EXT_PROC, typed_config=Any.pack(ask)),
        HttpFilter(name=BUFFER, typed_config=Any.pack(buffer), disabled=True),
    ]


def picker_routes(front: EnvoyFront, action: RouteAction) -> list[Route]:
    """How requests go there: those that are shown whole, then all others."""
    overrides = ExtProcPerRoute(overrides=ExtProcOverrides(processing_mode=_mode(request_headers=_SKIP)))
    buffer = BufferPerRoute(buffer=Buffer(max_request_bytes=front.body_bytes_max))
    some_bytes = RegexMatcher(regex="0*[1-9][0-9]*")
    return [
        Route(
            match=RouteMatch(
                prefix="/",
                headers=[HeaderMatcher(name="content-length", string_match=StringMatcher(safe_regex=some_bytes))],
            ),
            route=action,
            typed_per_filter_config={EXT_PROC: Any.pack(overrides), BUFFER: Any.pack(buffer)},
            request_headers_to_add=[_header_of_metadata(name) for name in (DESTINATION, RANK_HEADER)],
        ),
        Route(match=RouteMatch(prefix="/"), route=action),
    ]


def _processor(front: EnvoyFront) -> ExternalProcessor:
    service = GrpcService(
        envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=PICKER_CLUSTER),
        # A picker that is just going away refuses the stream; the other one can still choose.
        retry_policy=GrpcRetryPolicy(retry_on="connect-failure,refused-stream,reset", num_retries=1),
    )
    return ExternalProcessor(
        grpc_service=service,
        failure_mode_allow=front.fail_open,
        message_timeout=timedelta(seconds=front.message_timeout_s),
        processing_mode=_mode(request_headers=_SEND),
        # The picker asks for the response body where no sidecar can tell it the first token.
        allow_mode_override=True,
        request_attributes=[*REQUEST_ATTRIBUTES, *(f"request.headers['{name}']" for name in front.shown_headers)],
        response_attributes=list(RESPONSE_ATTRIBUTES),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, SUBSET_NAMESPACE]),
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE]),
        ),
    )


def _mode(*, request_headers: ProcessingModeHeaderSendMode) -> ProcessingMode:
    return ProcessingMode(
        request_header_mode=request_headers,
        request_body_mode=ProcessingModeBodySendMode.BUFFERED,
        request_trailer_mode=_SKIP,
        response_header_mode=_SEND,
        response_body_mode=ProcessingModeBodySendMode.NONE,
        # Keeps the picker's stream open until the response has ended: that is how a reservation ends.
        response_trailer_mode=_SEND,
    )


def _skip_usual_responses() -> Matcher:
    # The status comes first: before there is one, nothing is decided yet.
    is_success = MatcherMatcherListPredicate(
        single_predicate=MatcherMatcherListPredicateSinglePredicate(
            input=_extension("status", HttpResponseStatusCodeClassMatchInput()),
            value_match=ValueMatcher(exact="2xx"),
        )
    )
    expected = item(item(attribute("metadata", "filter_metadata"), LB_NAMESPACE), EXPECTED_KEY)
    is_from_chosen = holds(equal(attribute("upstream", "address"), expected))
    return Matcher(
        matcher_list=MatcherMatcherList(
            matchers=[
                MatcherMatcherListFieldMatcher(
                    predicate=MatcherMatcherListPredicate(
                        and_matcher=MatcherMatcherListPredicatePredicateList(predicate=[is_success, is_from_chosen])
                    ),
                    on_match=MatcherOnMatch(action=_extension("skip", SkipFilter())),
                )
            ]
        )
    )


def _extension(name: str, config: betterproto2.Message) -> TypedExtensionConfig:
    return TypedExtensionConfig(name=name, typed_config=Any.pack(config))


def _header_of_metadata(name: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, value=f"%DYNAMIC_METADATA({LB_NAMESPACE}:{name})%"),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
