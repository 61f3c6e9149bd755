"""Schemas of the custom resources that we use, as far as we use them.

Written from the reference of each API; a field that is not here is a mistake until somebody has
looked it up: LeaderWorkerSet (lws.sigs.k8s.io), ServiceMonitor and PrometheusRule
(prometheus-operator.dev), Issuer and Certificate (cert-manager.io), HTTPRoute and BackendTLSPolicy
(gateway-api.sigs.k8s.io).
"""

from typing import Any

Schema = dict[str, Any]


def fields(required: str, **properties: Schema) -> Schema:
    """An object of these fields and no others; ``required``: their names, with spaces between."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


TEXT: Schema = {"type": "string", "minLength": 1}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(h|m|s))+$"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
COUNT_OR_PERCENT: Schema = {"anyOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
POD_TEMPLATE: Schema = fields("metadata spec", metadata={}, spec={})  # validated as a pod elsewhere
KEY: Schema = fields("name key", name=TEXT, key=TEXT, optional=BOOLEAN)
SECRET_OR_CONFIG: Schema = fields("", secret=KEY, configMap=KEY)
ISSUER: Schema = fields("name", name=TEXT, kind=one_of("Issuer", "ClusterIssuer"), group=TEXT)

LEADER_WORKER_SET = fields(
    "leaderWorkerTemplate",
    replicas=COUNT,
    startupPolicy=one_of("LeaderCreated", "LeaderReady"),
    rolloutStrategy=fields(
        "type",
        type=one_of("RollingUpdate"),
        rollingUpdateConfiguration=fields(
            "", partition=COUNT, maxUnavailable=COUNT_OR_PERCENT, maxSurge=COUNT_OR_PERCENT
        ),
    ),
    networkConfig=fields("subdomainPolicy", subdomainPolicy=one_of("Shared", "UniquePerReplica")),
    leaderWorkerTemplate=fields(
        "workerTemplate",
        leaderTemplate=POD_TEMPLATE,
        workerTemplate=POD_TEMPLATE,
        size={"type": "integer", "minimum": 1},
        restartPolicy=one_of(
            "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None", "Default"
        ),
    ),
)

SERVICE_MONITOR = fields(
    "selector endpoints",
    jobLabel=TEXT,
    targetLabels=many(TEXT),
    namespaceSelector=fields("", any=BOOLEAN, matchNames=many(TEXT)),
    selector=fields("", matchLabels=LABELS, matchExpressions=many({"type": "object"})),
    endpoints=many(
        fields(
            "port",
            port=TEXT,
            path=TEXT,
            interval=DURATION,
            scrapeTimeout=DURATION,
            scheme=one_of("http", "https"),
            tlsConfig=fields(
                "",
                serverName=TEXT,
                insecureSkipVerify=BOOLEAN,
                ca=SECRET_OR_CONFIG,
                cert=SECRET_OR_CONFIG,
                keySecret=KEY,
            ),
        )
    ),
)

PROMETHEUS_RULE = fields(
    "groups",
    groups=many(
        fields(
            "name rules",
            name=TEXT,
            interval=DURATION,
            rules=many(
                fields(
                    "expr",
                    alert=TEXT,
                    record=TEXT,
                    expr=TEXT,
                    **{"for": DURATION},
                    keep_firing_for=DURATION,
                    labels=LABELS,
                    annotations=LABELS,
                )
            ),
        )
    ),
)

ISSUER_OF_CERTIFICATES = {
    "oneOf": [
        fields("selfSigned", selfSigned=fields("", crlDistributionPoints=many(TEXT))),
        fields("ca", ca=fields("secretName", secretName=TEXT)),
    ]
}

CERTIFICATE = fields(
    "secretName issuerRef",
    secretName=TEXT,
    isCA=BOOLEAN,
    commonName={"type": "string", "minLength": 1, "maxLength": 64},
    dnsNames=many(TEXT),
    ipAddresses=many(TEXT),
    duration=DURATION,
    renewBefore=DURATION,
    usages=many(one_of("server auth", "client auth", "digital signature", "key encipherment")),
    privateKey=fields(
        "",
        algorithm=one_of("RSA", "ECDSA", "Ed25519"),
        size={"type": "integer"},
        rotationPolicy=one_of("Never", "Always"),
    ),
    issuerRef=ISSUER,
)

HTTP_ROUTE = fields(
    "rules",
    parentRefs=many(fields("name", name=TEXT, namespace=TEXT, sectionName=TEXT)),
    hostnames=many(TEXT),
    rules=many(
        fields(
            "",
            matches=many(
                fields(
                    "",
                    path=fields("", type=one_of("Exact", "PathPrefix"), value=TEXT),
                    method=one_of("GET", "POST"),
                )
            ),
            timeouts=fields("", request=DURATION, backendRequest=DURATION),
            backendRefs=many(
                fields("name", name=TEXT, port={"type": "integer", "minimum": 1}, weight=COUNT)
            ),
        )
    ),
)

GROUP: Schema = {"type": "string"}  # empty: of Kubernetes itself

BACKEND_TLS_POLICY = fields(
    "targetRefs validation",
    targetRefs=many(fields("group kind name", group=GROUP, kind=TEXT, name=TEXT, sectionName=TEXT)),
    validation=fields(
        "hostname",
        caCertificateRefs=many(fields("group kind name", group=GROUP, kind=TEXT, name=TEXT)),
        wellKnownCACertificates=one_of("System"),
        hostname=TEXT,
    ),
)

SPECS: dict[tuple[str, str], Schema] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PROMETHEUS_RULE,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
    ("gateway.networking.k8s.io/v1", "BackendTLSPolicy"): BACKEND_TLS_POLICY,
    ("cert-manager.io/v1", "Issuer"): ISSUER_OF_CERTIFICATES,
    ("cert-manager.io/v1", "Certificate"): CERTIFICATE,
}
