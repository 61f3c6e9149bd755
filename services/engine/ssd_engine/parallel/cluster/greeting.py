"""How leader and node know each other: each proves that it has the secret, neither sends it.

A proof is over fresh nonces of both sides and over who says it, so that none is of use twice or
the other way round.
"""

import hmac
import secrets
import struct

from ssd_engine.parallel.cluster.wire import NodeConnection, NodeConnectionBroken

MAGIC = b"SSDNODE\x01"  # the last byte is the version of everything on this connection
_NONCE = 32
_CHALLENGE = struct.Struct(f"<8s{_NONCE}s")
_ANSWER = struct.Struct(f"<8s{_NONCE}s32s")
_VERDICT = struct.Struct("<?32s")


class WrongSecret(NodeConnectionBroken):
    pass


def challenge(connection: NodeConnection, secret: bytes, deadline: float) -> None:
    """The leader's side; raises Broken for a stranger, WrongSecret for one who says it knows."""
    ours = secrets.token_bytes(_NONCE)
    connection.write(_CHALLENGE.pack(MAGIC, ours), deadline)
    magic, theirs, proof = _ANSWER.unpack(connection.read(_ANSWER.size, deadline))
    if magic != MAGIC:
        raise NodeConnectionBroken("it is no node, or speaks another version")
    known = hmac.compare_digest(proof, _proof(secret, b"node", ours, theirs))
    answer = _proof(secret, b"leader", ours, theirs) if known else bytes(32)
    connection.write(_VERDICT.pack(known, answer), deadline)
    if not known:
        raise WrongSecret("it has another secret")


def answer(connection: NodeConnection, secret: bytes, deadline: float) -> None:
    """The node's side."""
    magic, theirs = _CHALLENGE.unpack(connection.read(_CHALLENGE.size, deadline))
    if magic != MAGIC:
        raise NodeConnectionBroken("it is no leader, or speaks another version")
    ours = secrets.token_bytes(_NONCE)
    proof = _proof(secret, b"node", theirs, ours)
    connection.write(_ANSWER.pack(MAGIC, ours, proof), deadline)
    known, returned = _VERDICT.unpack(connection.read(_VERDICT.size, deadline))
    if not known:
        raise WrongSecret("the leader has another secret")
    if not hmac.compare_digest(returned, _proof(secret, b"leader", theirs, ours)):
        raise WrongSecret("who answers there does not know the secret")


def _proof(secret: bytes, role: bytes, leaders: bytes, nodes: bytes) -> bytes:
    return hmac.digest(secret, b"|".join((MAGIC, role, leaders, nodes)), "sha256")
