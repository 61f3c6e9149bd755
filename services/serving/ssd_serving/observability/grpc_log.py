"""What gRPC itself logs of its peers. Any of them could fill the log with it."""

import logging

import grpc
from google.protobuf.message import DecodeError

from ssd_engine.process.sparse_log import SparseLog

LOGGERS = ("grpc._cython.cygrpc", "grpc._common")  # both report what cannot be decoded


class PeersInGrpcLog(logging.Filter):
    """What a peer's bytes have caused is said in one line, once in a while; neither the bytes nor a
    traceback is shown. Of peers that have hung up nothing is said. All else is left as it is."""

    def __init__(self, said: SparseLog | None = None) -> None:
        super().__init__()
        self._said = said or SparseLog()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, UnicodeDecodeError | DecodeError):
            kind = type(error).__name__
            self._said.warning(kind, f"gRPC: bytes of a peer that cannot be decoded: {error}")
            return False
        return not isinstance(error, grpc.aio.InternalError)


def tame_grpc_log() -> None:
    """Once in a process."""
    tame = PeersInGrpcLog()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(tame)
