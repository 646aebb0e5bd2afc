"""An endpoint picker that sends each request where its client asks, so that a test can watch Envoy alone.
Run as a script: NAME PORT.

The wish is the request header `x-test-destination` (metadata and header, as pickers answer) or
`x-test-destination-header` (header only). On the response it adds the attributes that Envoy sent it. To a request that
it is shown whole it can add but one header, `x-data-parallel-rank`: there it says its name.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

DESTINATION = "x-gateway-destination-endpoint"


class ToyPicker(pb_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self._name = name

    async def Process(  # noqa: N802
        self, messages: AsyncIterator[pb.ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProcessingResponse]:
        async for message in messages:
            kind = message.WhichOneof("request")
            if kind == "request_headers":
                yield self._place(message)
            elif kind == "request_body":
                yield (
                    self._place_whole(message)
                    if message.attributes
                    else pb.ProcessingResponse(request_body=pb.BodyResponse())
                )
            elif kind == "response_headers":
                yield self._report(message)
            elif kind == "response_trailers":
                yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def _place(self, message: pb.ProcessingRequest) -> pb.ProcessingResponse:
        headers = {h.key: h.raw_value.decode() for h in message.request_headers.headers.headers}
        mutation = pb.HeaderMutation(
            set_headers=[_header("x-test-picker", self._name), _header("x-test-seen", headers.get(DESTINATION, ""))]
        )
        reply = pb.ProcessingResponse()
        wish = headers.get("x-test-destination")
        if wish is not None:
            metadata = Struct()
            metadata.update({"envoy.lb": {DESTINATION: wish}})
            reply.dynamic_metadata.CopyFrom(metadata)
        wish = wish or headers.get("x-test-destination-header")
        if wish is not None:
            mutation.set_headers.append(_header(DESTINATION, wish))
        reply.request_headers.response.header_mutation.CopyFrom(mutation)
        return reply

    def _place_whole(self, message: pb.ProcessingRequest) -> pb.ProcessingResponse:
        attributes = message.attributes["envoy.filters.http.ext_proc"].fields
        choice = {"x-data-parallel-rank": self._name}
        wish = attributes.get("request.headers['x-test-destination']")
        if wish is not None:
            choice[DESTINATION] = wish.string_value
        metadata = Struct()
        metadata.update({"envoy.lb": choice})
        return pb.ProcessingResponse(request_body=pb.BodyResponse(), dynamic_metadata=metadata)

    def _report(self, message: pb.ProcessingRequest) -> pb.ProcessingResponse:
        attributes = message.attributes["envoy.filters.http.ext_proc"].fields
        served = message.metadata_context.filter_metadata["envoy.lb"].fields.get(f"{DESTINATION}-served")
        pairs = {
            "x-test-upstream": attributes["upstream.address"].string_value,
            "x-test-attempts": str(int(attributes["upstream.request_attempt_count"].number_value)),
            "x-test-code": str(int(attributes["response.code"].number_value)),
            "x-test-served": served.string_value if served is not None else "",
        }
        reply = pb.ProcessingResponse()
        for key, value in pairs.items():
            reply.response_headers.response.header_mutation.set_headers.append(_header(key, value))
        return reply


def _header(key: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


async def main(name: str, port: int) -> None:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
    )
    pb_grpc.add_ExternalProcessorServicer_to_server(ToyPicker(name), server)
    states = health.aio.HealthServicer()
    await states.set("envoy.service.ext_proc.v3.ExternalProcessor", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
