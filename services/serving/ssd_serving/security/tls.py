"""Certificates of a service: checked at start, read again whenever they change."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from ssd_engine.errors import ConfigError
from ssd_engine.process.secret_files import warn_of_readers
from ssd_serving.files.descriptors import read_surely
from ssd_serving.files.reloading import Reloading, Unreadable


@dataclass(frozen=True)
class TlsFiles:
    """The files of a service. ``ca`` signs clients' certificates; None: clients show none."""

    cert: Path
    key: Path
    ca: Path | None

    @property
    def paths(self) -> list[Path]:
        return [self.cert, self.key] if self.ca is None else [self.cert, self.key, self.ca]

    def check(self) -> None:
        """Checks that each file is what it should be, and that the key is the certificate's."""
        check_key_pair("--tls-cert", self.cert, "--tls-key", self.key)
        if self.ca is not None:
            check_ca("--tls-ca", self.ca)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        self.check()
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.cert.read_bytes())],
            None if self.ca is None else self.ca.read_bytes(),
        )


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The same for ports that speak no gRPC."""
    files.check()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    if files.ca is not None:
        context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def server_credentials(files: TlsFiles, on_failure: Callable[[], None]) -> grpc.ServerCredentials:
    """Each new connection is greeted with the files as they are then; old connections go on."""
    current = Reloading(
        files.paths,
        files.configuration,
        on_failure,
        on_change=lambda: warn_of_readers("--tls-key", files.key),
    )
    return grpc.dynamic_ssl_server_credentials(
        current.get(), current.changed, require_client_authentication=files.ca is not None
    )


def check_key_pair(cert_flag: str, cert: Path, key_flag: str, key: Path) -> None:
    _check_readable(cert_flag, cert)
    _check_readable(key_flag, key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{cert_flag} {cert}, {key_flag} {key}: not a PEM certificate and its key ({error})"
        ) from None


def check_ca(flag: str, path: Path) -> None:
    _check_readable(flag, path)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag} {path}: not a PEM certificate ({error})") from None
    if not context.cert_store_stats()["x509"]:
        raise ConfigError(f"{flag} {path}: holds no certificate")


def _check_readable(flag: str, path: Path) -> None:
    try:
        read_surely(path.read_bytes)
    except OSError as error:
        raise Unreadable(f"{flag} {path}: {error.strerror}") from None


def _no_password() -> str:
    """Nobody is there to type one."""
    raise ValueError("the key is encrypted")
