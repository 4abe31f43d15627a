"""What HAProxy needs to see of a router: `small_server.py HTTP_PORT GRPC_PORT`. Its answers are its process id.

The path `/slow` and the prompt `slow` take `SLOW_S`."""

import asyncio
import os
import sys

import grpc
import uvicorn

from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

SLOW_S = 5
HEALTHZ = "/ray.serve.RayServeAPIService/Healthz"


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(SLOW_S)
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": str(os.getpid()).encode()})


class Generation(generation_pb2_grpc.GenerationServicer):
    async def GenerateOnce(self, request, context):
        if request.prompt == "slow":
            await asyncio.sleep(SLOW_S)
        return generation_pb2.GenerateOnceResponse(text=str(os.getpid()))


class Control(control_pb2_grpc.ControlServicer):
    async def WatchCache(self, request, context):
        while True:
            yield control_pb2.WatchCacheResponse()
            await asyncio.sleep(0.1)


class Health(grpc.GenericRpcHandler):
    """HAProxy looks for the word in the answer."""

    def service(self, details):
        if details.method != HEALTHZ:
            return None

        async def healthz(request: bytes, context) -> bytes:
            return b"\n\x07success"

        return grpc.unary_unary_rpc_method_handler(healthz)


async def main(http_port: int, grpc_port: int) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Health(),))
    generation_pb2_grpc.add_GenerationServicer_to_server(Generation(), server)
    control_pb2_grpc.add_ControlServicer_to_server(Control(), server)
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    config = uvicorn.Config(app, "127.0.0.1", http_port, log_level="warning", lifespan="off")
    http = uvicorn.Server(config)
    task = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.02)
    print("ready", flush=True)
    await task


asyncio.run(main(*map(int, sys.argv[1:])))
