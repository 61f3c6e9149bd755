"""What is offered and asked of a target's features, as messages of a link and as plain data."""

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.speculation.features import (
    MAX_HIDDEN_SIZE,
    FeatureNeeds,
    FeatureOffer,
    FeatureTerms,
)
from ssd_serving.rpc.plane_messages import MAX_NAME, decode_offer, encode_offer

MOST_NAMED = 64  # boundaries in a message; how many a head may read is another question


def encode_feature_offer(offer: FeatureOffer) -> pb.FeatureOffer:
    return pb.FeatureOffer(
        hidden_size=offer.hidden_size,
        num_layers=offer.num_layers,
        dtype=offer.dtype,
        plane=encode_offer(offer.plane),
    )


def decode_feature_offer(message: pb.FeatureOffer) -> FeatureOffer:
    return FeatureOffer(
        message.hidden_size,
        message.num_layers,
        message.dtype[:MAX_NAME],
        decode_offer(message.plane),
    )


def encode_feature_terms(terms: FeatureTerms) -> pb.FeatureTerms:
    needs = terms.needs
    return pb.FeatureTerms(
        boundaries=needs.boundaries,
        hidden_size=needs.hidden_size,
        dtype=needs.dtype,
        window=terms.window,
    )


def decode_feature_terms(message: pb.FeatureTerms) -> FeatureTerms:
    """Raises InputError for what is no head's; whether it fits a target is another question."""
    if len(message.boundaries) > MOST_NAMED:
        problem = f"at most {MOST_NAMED}, got {len(message.boundaries)}"
        raise InputError("features.boundaries", problem)
    if not 1 <= message.hidden_size <= MAX_HIDDEN_SIZE:
        problem = f"must be in [1, {MAX_HIDDEN_SIZE}], got {message.hidden_size}"
        raise InputError("features.hidden_size", problem)
    needs = FeatureNeeds(tuple(message.boundaries), message.hidden_size, message.dtype[:MAX_NAME])
    return FeatureTerms(needs, message.window)
