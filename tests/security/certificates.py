"""Certificates as an operator would make them: an authority, and what it signs."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM."""

    cert: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Key first: whoever looks in between finds a pair that does not fit, not a wrong one."""
        cert, key = folder / f"{name}.crt", folder / f"{name}.key"
        replace(key, self.key)
        replace(cert, self.cert)
        return cert, key


class Authority:
    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key, DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        self.cert = builder.sign(self._key, hashes.SHA256()).public_bytes(PEM)

    def sign(
        self,
        name: str,
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
        valid: datetime.timedelta = DAY,
    ) -> Pair:
        """``valid`` below zero: expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = _builder(_name(name), self._name, key, valid).add_extension(names, False)
        cert = builder.sign(self._key, hashes.SHA256())
        plain = serialization.NoEncryption()
        private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain)
        return Pair(cert.public_bytes(PEM), private)


def replace(path: Path, data: bytes) -> None:
    """As a mounted Secret changes: the name stays, the file behind it is another one."""
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(data)
    partial.chmod(0o600)
    partial.replace(path)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    valid: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 30 * DAY)
        .not_valid_after(now + valid)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
