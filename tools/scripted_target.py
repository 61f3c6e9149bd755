"""A target that computes nothing: it sends tokens as fast as they are read, or holds its streams.

    python -m tools.scripted_target --port-file F [--messages 200] [--tokens 5]

For benchmarks of what stands before targets: whatever time passes is theirs. A request whose
max_tokens is 1 is held open and gets one token.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_serving.files.port_file import write_port

PIECE = " word"


class ScriptedTarget(rpc.TargetServiceServicer):
    def __init__(self, messages: int, tokens: int) -> None:
        self._messages = messages
        self._tokens = pb.GenerateResponse(
            tokens=pb.GenerateTokens(
                token_ids=[7] * tokens,
                text=PIECE * tokens,
                origins=[pb.TOKEN_ORIGIN_CACHE] * tokens,
                text_lengths=[len(PIECE)] * tokens,
            )
        )
        usage = pb.Usage(prompt_tokens=1, completion_tokens=messages * tokens)
        self._finish = pb.GenerateResponse(
            finish=pb.GenerateFinish(reason=pb.FINISH_REASON_LENGTH, usage=usage)
        )

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(name="scripted", max_num_seqs=4096, max_model_len=1 << 20)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        started = pb.GenerateStarted(seed=request.sampling.seed, model_fingerprint="scripted")
        await context.write(pb.GenerateResponse(started=started))
        if request.stop.max_tokens == 1:
            await context.write(self._tokens)
            await asyncio.Event().wait()
        for _ in range(self._messages):
            await context.write(self._tokens)
        await context.write(self._finish)


class AlwaysReady(health_pb2_grpc.HealthServicer):
    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


async def serve(port_file: Path, messages: int, tokens: int) -> None:
    server = grpc.aio.server()
    rpc.add_TargetServiceServicer_to_server(ScriptedTarget(messages, tokens), server)
    health_pb2_grpc.add_HealthServicer_to_server(AlwaysReady(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_port(port_file, port)
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=5)
    args = parser.parse_args()
    asyncio.run(serve(args.port_file, args.messages, args.tokens))


if __name__ == "__main__":
    main()
