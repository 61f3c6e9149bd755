"""What guards the ports of a service, made from its options."""

from ssd_engine.process.secret_files import warn_of_readers
from ssd_serving.config import ListeningConfig
from ssd_serving.observability.metrics import ServiceMetrics
from ssd_serving.security.access import Access
from ssd_serving.security.tls import TlsFiles
from ssd_serving.security.tokens import load_tokens


def check_security(config: ListeningConfig) -> None:
    """Raise ConfigError for files that are not what they should be."""
    files = tls_files(config)
    if files is not None:
        files.check()
    if config.token_file is not None:
        load_tokens(config.token_file)
    warn_of_readers("--tls-key", config.tls_key)
    warn_of_readers("--token-file", config.token_file)


def tls_files(config: ListeningConfig) -> TlsFiles | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)


def make_access(config: ListeningConfig, metrics: ServiceMetrics) -> Access:
    return Access(
        config.token_file,
        on_refusal=lambda reason: metrics.auth_failures.labels(reason).inc(),
        on_reload_failure=metrics.reload_failures.labels("tokens").inc,
    )
