"""Checks whether a target and this endpoint fit, once, when a link begins."""

from dataclasses import dataclass
from pathlib import PurePath

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.records import TargetLinkUp
from ssd_draft.speculators.registry import WITHOUT_MODEL
from ssd_engine.errors import SSDError
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_engine.speculation.frames import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from ssd_serving.rpc.feature_messages import decode_feature_offer, encode_feature_terms
from ssd_serving.rpc.frame_messages import FrameLimits
from ssd_serving.rpc.plane_messages import decode_offer

MAX_NAME_BYTES = 256
MAX_VOCABULARY = 2**24
NO_DEPTH_BEYOND = 1024  # tokens of a target's speculation


class HandshakeRefused(SSDError):
    """The two peers do not fit. ``reason`` is one of a few words, for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class DraftIdentity:
    """What this endpoint is, and what a target must share with it."""

    name: str
    speculator: str  # a name of pb.SpeculatorKind
    tokenizer_fingerprint: str | None  # None: any tokenizer will do
    vocab_size: int | None
    max_context: int
    max_sequences: int  # sequences of one link
    depth: int
    budget: int
    features: FeatureTerms | None = None  # what a head reads of its target
    verifier: str = ""  # the target that a head was trained for, where it says so


def check_hello(hello: pb.Hello, endpoint: DraftIdentity) -> FrameLimits:
    """The limits of this link's frames; raises HandshakeRefused."""
    _agree_on_version(hello)
    _check_tokens(hello, endpoint)
    if endpoint.features is not None:
        _check_features(hello, endpoint.features.needs)
    if len(hello.target_name.encode()) > MAX_NAME_BYTES:
        raise HandshakeRefused(
            "name",
            f"target_name: at most {MAX_NAME_BYTES} bytes, got {len(hello.target_name.encode())}: "
            "give the target a shorter name",
        )
    if not 1 <= hello.max_depth <= NO_DEPTH_BEYOND:
        raise HandshakeRefused(
            "depth",
            f"max_depth: must be in [1, {NO_DEPTH_BEYOND}], the target says {hello.max_depth}: "
            "set the longest speculation that it verifies",
        )
    return FrameLimits(hello.vocab_size, endpoint.max_context, hello.max_depth)


def _agree_on_version(hello: pb.Hello) -> int:
    """The newest version that both sides speak."""
    newest = min(hello.protocol_version, PROTOCOL_VERSION)
    if newest < max(hello.oldest_protocol_version, OLDEST_PROTOCOL_VERSION):
        older = "target" if hello.protocol_version < OLDEST_PROTOCOL_VERSION else "draft"
        raise HandshakeRefused(
            "protocol",
            f"protocol_version: the target speaks {hello.oldest_protocol_version} to "
            f"{hello.protocol_version}, this draft {OLDEST_PROTOCOL_VERSION} to "
            f"{PROTOCOL_VERSION}: upgrade the {older}",
        )
    return newest


def _check_tokens(hello: pb.Hello, endpoint: DraftIdentity) -> None:
    if not 1 <= hello.vocab_size <= MAX_VOCABULARY:
        raise HandshakeRefused(
            "vocabulary",
            f"vocab_size: must be in [1, {MAX_VOCABULARY}], the target says {hello.vocab_size}",
        )
    ours = endpoint.tokenizer_fingerprint
    if ours is not None and hello.tokenizer_fingerprint != ours:
        raise HandshakeRefused(
            "tokenizer",
            f"tokenizer_fingerprint: the target has {hello.tokenizer_fingerprint[:64]!r}, this "
            f"draft {ours!r}: serve a draft model with the target's tokenizer, or {WITHOUT_MODEL}",
        )
    if endpoint.vocab_size is not None and hello.vocab_size != endpoint.vocab_size:
        raise HandshakeRefused(
            "vocabulary",
            f"vocab_size: the target has {hello.vocab_size}, this draft {endpoint.vocab_size}: "
            f"serve a draft model with the target's vocabulary, or {WITHOUT_MODEL}",
        )


def _check_features(hello: pb.Hello, needs: FeatureNeeds) -> None:
    if not hello.HasField("features"):
        raise HandshakeRefused(
            "features",
            "features: the target tells none of its hidden states, which this draft reads: upgrade "
            "the target, or serve a draft model",
        )
    offer = decode_feature_offer(hello.features)
    misfit = needs.problem_with(offer.hidden_size, offer.num_layers)
    if misfit is not None:
        field, problem = misfit
        raise HandshakeRefused(
            "features",
            f"features.{field}: {problem}: serve a head that was trained for this target",
        )


def is_of_another_target(hello: pb.Hello, endpoint: DraftIdentity) -> bool:
    """Whether a head was trained for a target of another name. It may fit for all that."""
    verifier = PurePath(endpoint.verifier).name
    return bool(verifier) and verifier != PurePath(hello.target_name).name


def link_up(link: int, hello: pb.Hello, limits: FrameLimits, interface: str = "") -> TargetLinkUp:
    """The engine's record of the new link. ``interface``: our own address on it."""
    offered = hello.HasField("tensor_plane")
    offer = decode_offer(hello.tensor_plane) if offered else None
    told = decode_feature_offer(hello.features).plane if hello.HasField("features") else None
    return TargetLinkUp(link, limits.max_depth, hello.epoch, offer, interface, told)


def make_welcome(hello: pb.Hello, endpoint: DraftIdentity) -> pb.Welcome:
    return pb.Welcome(
        protocol_version=_agree_on_version(hello),
        epoch=hello.epoch,
        draft_name=endpoint.name,
        speculator=endpoint.speculator,
        max_sequences=endpoint.max_sequences,
        max_context=endpoint.max_context,
        max_depth=endpoint.depth,
        features=None if endpoint.features is None else encode_feature_terms(endpoint.features),
    )
