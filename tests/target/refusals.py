"""Calls that a target refuses."""

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status


def refusal(call: Any, code: grpc.StatusCode) -> grpc.RpcError:
    """The error that a stream ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: grpc.RpcError = caught.value
    assert error.code() is code
    return error


def retry_seconds(error: grpc.RpcError) -> float:
    """The hint that comes with a refusal."""
    info = error_details_pb2.RetryInfo()
    (detail,) = rpc_status.from_call(error).details
    assert detail.Unpack(info)
    return float(info.retry_delay.ToMilliseconds()) / 1000
