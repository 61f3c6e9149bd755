"""Two ends of a connection prove to each other that they know one secret, which neither sends.

Each end says its protocol, its version and a fresh nonce. The guest, who dialled, proves first; the
host answers with a proof of its own, or with none. A proof is over what both have said, over who
gives it and over its terms: none is of use twice, the other way round, or for other terms.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Protocol

from ssd_engine.errors import SSDError

MAX_TERMS_BYTES = 1024
_NONCE_BYTES = 32
_OPENING = struct.Struct("<8sH2x")  # protocol and version; the nonce follows
_PROOF = struct.Struct("<32sH")  # a proof and the size of the terms, which follow
_NO_PROOF = bytes(32)


class UnknownPeer(SSDError):
    """The other end speaks something else, or another version, or does not know the secret."""


class WrongSecret(UnknownPeer):
    """The two ends have different secrets."""


class ByteStream(Protocol):
    def read(self, size: int, deadline: float) -> bytes: ...

    def write(self, data: bytes, deadline: float) -> None: ...


@dataclass(frozen=True)
class SecretHandshake:
    """The handshake of one protocol. Both sides return the terms that the other one has proved."""

    protocol: bytes  # eight bytes
    version: int  # of everything that is said on the connection
    host: str
    guest: str

    def admit(
        self, stream: ByteStream, secret: bytes, deadline: float, terms: bytes = b""
    ) -> bytes:
        """The host's side."""
        ours, theirs = self._open(stream, self.guest, deadline)
        key = hmac.digest(secret, ours + theirs, "sha256")
        proof, said = _hear(stream, deadline)
        if not hmac.compare_digest(proof, _proof(key, self.guest, said)):
            stream.write(_PROOF.pack(_NO_PROOF, 0), deadline)
            raise WrongSecret("it has another secret")
        _say(stream, _proof(key, self.host, terms), terms, deadline)
        return said

    def enter(
        self, stream: ByteStream, secret: bytes, deadline: float, terms: bytes = b""
    ) -> bytes:
        """The guest's side."""
        ours, theirs = self._open(stream, self.host, deadline)
        key = hmac.digest(secret, theirs + ours, "sha256")
        _say(stream, _proof(key, self.guest, terms), terms, deadline)
        proof, said = _hear(stream, deadline)
        if proof == _NO_PROOF:
            raise WrongSecret(f"the {self.host} has another secret")
        if not hmac.compare_digest(proof, _proof(key, self.host, said)):
            raise WrongSecret("who answers there does not know the secret")
        return said

    def _open(self, stream: ByteStream, peer: str, deadline: float) -> tuple[bytes, bytes]:
        """What each end has said first; neither waits for the other with it."""
        opening = _OPENING.pack(self.protocol, self.version)
        ours = opening + secrets.token_bytes(_NONCE_BYTES)
        stream.write(ours, deadline)
        protocol, version = _OPENING.unpack(stream.read(_OPENING.size, deadline))
        if protocol != self.protocol:
            raise UnknownPeer(f"it is no {peer}, or speaks another version")
        if version != self.version:
            raise UnknownPeer(f"the {peer} speaks version {version}, this end {self.version}")
        return ours, opening + stream.read(_NONCE_BYTES, deadline)


def _say(stream: ByteStream, proof: bytes, terms: bytes, deadline: float) -> None:
    stream.write(_PROOF.pack(proof, len(terms)) + terms, deadline)


def _hear(stream: ByteStream, deadline: float) -> tuple[bytes, bytes]:
    proof, size = _PROOF.unpack(stream.read(_PROOF.size, deadline))
    if size > MAX_TERMS_BYTES:
        raise UnknownPeer(f"its terms take {size} bytes")
    return proof, stream.read(size, deadline)


def _proof(key: bytes, role: str, terms: bytes) -> bytes:
    return hmac.digest(key, role.encode() + b"|" + terms, "sha256")
