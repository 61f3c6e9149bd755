"""The offer and the answer of a tensor plane, as messages of a link and as plain data."""

from msgspec.structs import asdict

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import target_pb2
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind, PlaneOffer
from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_engine.tensor_plane.protocol.streams import RowsDirection, RowsStream

MAX_NAME = 256  # characters of an id or a name
MAX_STREAMS = 16
_KIND, _WAY = "TENSOR_PLANE_KIND_", "TENSOR_PLANE_DIRECTION_"
_KINDS = {pb.TensorPlaneKind.Value(_KIND + kind.name): kind for kind in PlaneKind}
_WAYS = {pb.TensorPlaneDirection.Value(_WAY + way.name): way for way in RowsDirection}


def encode_offer(offer: PlaneOffer) -> pb.TensorPlaneOffer:
    return pb.TensorPlaneOffer(
        kinds=[_KIND + kind.name for kind in offer.kinds],
        host_id=offer.host_id,
        device_id=offer.device_id,
        streams=map(_encode_stream, offer.streams),
    )


def decode_offer(message: pb.TensorPlaneOffer) -> PlaneOffer:
    """Kinds that are not known here are left out."""
    return PlaneOffer(
        tuple(_KINDS[kind] for kind in message.kinds if kind in _KINDS),
        message.host_id[:MAX_NAME],
        message.device_id[:MAX_NAME],
        tuple(map(_decode_stream, message.streams[:MAX_STREAMS])),
    )


def encode_answer(answer: PlaneAnswer) -> pb.TensorPlaneAnswer:
    return pb.TensorPlaneAnswer(
        kind=_KIND + answer.kind.name,
        address=answer.address,
        secret=answer.secret,
        stream=_encode_stream(answer.stream),
    )


def decode_answer(message: pb.TensorPlaneAnswer) -> PlaneAnswer | None:
    """None: of a kind that is not known here."""
    if message.kind not in _KINDS:
        return None
    stream = _decode_stream(message.stream)
    return PlaneAnswer(_KINDS[message.kind], message.address, message.secret, stream)


def encode_report(report: PlaneReport) -> target_pb2.TensorPlaneReport:
    return target_pb2.TensorPlaneReport(**asdict(report))


def _encode_stream(stream: RowsStream) -> pb.TensorPlaneStream:
    return pb.TensorPlaneStream(**{**stream.fields(), "direction": _WAY + stream.direction.name})


def _decode_stream(message: pb.TensorPlaneStream) -> RowsStream:
    return RowsStream(
        message.name[:MAX_NAME],
        _WAYS.get(message.direction, RowsDirection.UNSPECIFIED),
        message.width,
        message.dtype[:MAX_NAME],
        message.max_rows,
    )
