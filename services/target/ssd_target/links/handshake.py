"""The handshake of a link: hello, welcome, and whether the two peers fit."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.speculation.features import FeatureOffer, FeatureTerms
from ssd_engine.speculation.frames import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from ssd_engine.tensor_plane.protocol.handshake import PlaneOffer
from ssd_serving.rpc.feature_messages import decode_feature_terms, encode_feature_offer
from ssd_serving.rpc.messages import decode_message
from ssd_serving.rpc.plane_messages import encode_offer
from ssd_target.links.link_errors import EndpointMisfit, LinkBroken, raise_status

HANDSHAKE_SECONDS = 3.0


@dataclass(frozen=True)
class TargetIdentity:
    """What this target says of itself."""

    name: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_depth: int
    plane: PlaneOffer | None
    features: FeatureOffer | None = None

    def on_this_host(self) -> "TargetIdentity":
        """The same target, whose rows do not cross a network."""
        plane, told = self.plane, self.features
        return replace(
            self,
            plane=None if plane is None else plane.on_this_host(),
            features=None if told is None else replace(told, plane=told.plane.on_this_host()),
        )


@dataclass(frozen=True)
class Agreed:
    """What a handshake has settled."""

    welcome: pb.Welcome
    features: FeatureTerms | None  # what the endpoint reads of the target's hidden states


async def shake_hands(call: Any, identity: TargetIdentity, epoch: int, trusted: bool) -> Agreed:
    """What the endpoint's welcome says. ``trusted``: it is offered a plane for distributions."""
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await call.write(_hello(identity, epoch, trusted))
            first = await call.read()
    except TimeoutError:
        call.cancel()
        raise LinkBroken("silent", "no answer to hello") from None
    if first is grpc.aio.EOF:
        await raise_status(call)
    welcome = _welcome(parse_response(first), epoch)
    return Agreed(welcome, _features(welcome, identity.features))


def parse_response(data: bytes) -> pb.SpeculateResponse:
    """Messages come as bytes: one that does not parse is the endpoint's fault, not ours."""
    try:
        return decode_message(pb.SpeculateResponse, data)
    except InputError as error:
        raise EndpointMisfit("protocol", f"the endpoint broke the protocol: {error}") from None


def _hello(identity: TargetIdentity, epoch: int, trusted: bool) -> pb.SpeculateRequest:
    offer = identity.plane if trusted else None
    told = identity.features
    if told is not None and not trusted:
        told = replace(told, plane=told.plane.hardened())
    return pb.SpeculateRequest(
        hello=pb.Hello(
            tensor_plane=None if offer is None else encode_offer(offer),
            protocol_version=PROTOCOL_VERSION,
            oldest_protocol_version=OLDEST_PROTOCOL_VERSION,
            epoch=epoch,
            target_name=identity.name,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            vocab_size=identity.vocab_size,
            max_depth=identity.max_depth,
            features=None if told is None else encode_feature_offer(told),
        )
    )


def _welcome(message: pb.SpeculateResponse, epoch: int) -> pb.Welcome:
    if message.WhichOneof("message") != "welcome":
        raise EndpointMisfit("protocol", "the endpoint did not begin with welcome")
    welcome = message.welcome
    version = welcome.protocol_version
    if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
        older = "endpoint" if version < OLDEST_PROTOCOL_VERSION else "target"
        raise EndpointMisfit(
            "misfit",
            f"the endpoint speaks protocol version {version}, this target "
            f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}: upgrade the {older}",
        )
    if welcome.epoch != epoch:
        raise EndpointMisfit("protocol", "the endpoint welcomed another epoch")
    if not welcome.max_sequences or not welcome.max_depth:
        raise EndpointMisfit("misfit", "the endpoint offers no sequences or no depth")
    return welcome


def _features(welcome: pb.Welcome, offer: FeatureOffer | None) -> FeatureTerms | None:
    if not welcome.HasField("features"):
        return None
    if offer is None:
        raise EndpointMisfit(
            "misfit", "features: the endpoint reads hidden states, which this target does not tell"
        )
    try:
        terms = decode_feature_terms(welcome.features)
    except InputError as error:
        raise EndpointMisfit("protocol", f"the endpoint broke the protocol: {error}") from None
    misfit = terms.needs.problem_with(offer.hidden_size, offer.num_layers)
    if misfit is not None:
        field, problem = misfit
        raise EndpointMisfit(
            "misfit", f"features.{field}: {problem}: link a head that was trained for this target"
        )
    return terms
