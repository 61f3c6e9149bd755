"""What an operator has to provide; docs/deploy.md lists the same."""

# Secrets, and the keys in them.
SECRETS: dict[str, frozenset[str]] = {
    "ssd-target-tls": frozenset({"tls.crt", "tls.key", "ca.crt"}),
    "ssd-draft-tls": frozenset({"tls.crt", "tls.key", "ca.crt"}),
    "ssd-gateway-tls": frozenset({"tls.crt", "tls.key", "ca.crt"}),
    "ssd-client-tls": frozenset({"tls.crt", "tls.key", "ca.crt"}),
    "ssd-target-tokens": frozenset({"tokens.toml"}),
    "ssd-draft-tokens": frozenset({"tokens.toml"}),
    "ssd-draft-access": frozenset({"token"}),
    "ssd-client-access": frozenset({"token"}),
    "ssd-gateway-access": frozenset({"token"}),
    "ssd-cluster": frozenset({"secret"}),
}
