"""Every overlay keeps our rules, and each rule can be broken."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy.checks import CHECKS
from tests.deploy.manifests import OVERLAYS, Manifest, Manifests, manifests, named


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_keeps_every_rule(overlay: str) -> None:
    objects = manifests(overlay)
    wrong = {title: list(check(objects)) for title, check in CHECKS.items()}
    assert {title: said for title, said in wrong.items() if said} == {}


def target(objects: Manifests) -> Any:
    return named(objects, "StatefulSet", "ssd-target")["spec"]["template"]["spec"]


def draft(objects: Manifests) -> Any:
    return named(objects, "Deployment", "ssd-draft")["spec"]["template"]["spec"]


def gateway(objects: Manifests) -> Any:
    return named(objects, "Deployment", "ssd-gateway")["spec"]["template"]["spec"]


def worker(objects: Manifests) -> Any:
    group = named(objects, "LeaderWorkerSet", "ssd-target-nodes")["spec"]["leaderWorkerTemplate"]
    return group["workerTemplate"]["spec"]


def first(spec: Manifest) -> Any:
    return spec["containers"][0]


def policy(objects: Manifests, called: str) -> Any:
    return named(objects, "NetworkPolicy", called)["spec"]


def budget(objects: Manifests) -> Any:
    return named(objects, "PodDisruptionBudget", "ssd-target")["spec"]


def drop(objects: Manifests, kind: str, called: str) -> None:
    objects.remove(named(objects, kind, called))


def flag(spec: Manifest, old: str, new: str) -> None:
    arguments = first(spec)["args"]
    arguments[arguments.index(old)] = new


# What is spoiled in which overlay, and what the rule says of it.
SPOILED: list[tuple[str, str, Callable[[Manifests], object], str]] = [
    ("security contexts", "gpu",
     lambda o: target(o)["securityContext"].pop("runAsNonRoot"), "runAsNonRoot is not True"),
    ("security contexts", "gpu",
     lambda o: target(o)["securityContext"].pop("seccompProfile"), "seccompProfile is not"),
    ("security contexts", "gpu",
     lambda o: target(o)["securityContext"].update(runAsUser=0), "a user of the system"),
    ("security contexts", "gpu", lambda o: target(o).update(hostPID=True), "hostPID"),
    ("security contexts", "gpu",
     lambda o: first(draft(o))["securityContext"].update(readOnlyRootFilesystem=False),
     "readOnlyRootFilesystem is not True"),
    ("security contexts", "gpu",
     lambda o: first(draft(o))["securityContext"].pop("allowPrivilegeEscalation"),
     "allowPrivilegeEscalation is not False"),
    ("security contexts", "gpu",
     lambda o: first(draft(o))["securityContext"].update(capabilities={"add": ["SYS_ADMIN"]}),
     "keeps capabilities"),
    ("no account token", "gpu",
     lambda o: target(o).pop("automountServiceAccountToken"), "mounts the token"),
    ("no account token", "gpu", lambda o: draft(o).pop("enableServiceLinks"), "taken for options"),
    ("requests and limits", "gpu",
     lambda o: first(target(o))["resources"]["limits"].pop("memory"), "no limits of memory"),
    ("requests and limits", "gpu",
     lambda o: first(draft(o))["resources"]["requests"].update(cpu="9"), "than its limit"),
    ("requests and limits", "gpu",
     lambda o: first(draft(o))["resources"]["requests"].pop("nvidia.com/gpu"), "overcommitted"),
    ("temporary volumes are bounded", "gpu",
     lambda o: [v["emptyDir"].pop("sizeLimit") for v in target(o)["volumes"] if "emptyDir" in v],
     "has no sizeLimit"),
    ("temporary volumes are bounded", "cpu",
     lambda o: [v["emptyDir"].update(sizeLimit="4Gi")
                for v in target(o)["volumes"] if v["name"] == "shm"], "half of the memory"),
    ("a read-only root, and room to write", "gpu",
     lambda o: first(target(o)).update(volumeMounts=[]), "cannot write to /tmp"),
    ("a read-only root, and room to write", "gpu",
     lambda o: [v["emptyDir"].pop("medium", 0) for v in target(o)["volumes"] if "emptyDir" in v],
     "/dev/shm is not memory"),
    ("one rank for each GPU", "gpu",
     lambda o: first(target(o))["resources"]["limits"].update({"nvidia.com/gpu": "4"}),
     "2 ranks on 1 nodes of 4 GPUs"),
    ("images of this version", "gpu",
     lambda o: first(target(o)).update(image="ssd-cuda:latest"), "no image of ours"),
    ("health probes", "gpu",
     lambda o: first(target(o)).pop("startupProbe"), "startupProbe does not ask"),
    ("health probes", "gpu",
     lambda o: first(draft(o)).pop("readinessProbe"), "readinessProbe does not ask"),
    ("health probes", "gpu",
     lambda o: first(draft(o))["livenessProbe"]["grpc"].update(port=7420),
     "livenessProbe does not ask"),
    ("health probes", "gpu",
     lambda o: first(target(o))["readinessProbe"]["grpc"].update(service="liveness"),
     "readinessProbe does not ask"),
    ("health probes", "gpu",
     lambda o: first(target(o))["args"].remove("--health-listen=0.0.0.0:7412"),
     "no plain health port"),
    ("health probes", "gpu",
     lambda o: first(gateway(o))["readinessProbe"]["httpGet"].update(path="/health"),
     "readinessProbe does not ask /ready over HTTPS"),
    ("health probes", "gpu",
     lambda o: first(gateway(o))["livenessProbe"]["httpGet"].update(scheme="HTTP"),
     "livenessProbe does not ask /health over HTTPS"),
    ("health probes", "gpu",
     lambda o: first(gateway(o))["args"].append("--tls-ca=/etc/ssd/tls/ca.crt"),
     "no certificate to show"),
    ("time to load", "gpu",
     lambda o: first(target(o))["startupProbe"].update(failureThreshold=3), "30 s to load"),
    ("time to drain", "gpu",
     lambda o: target(o).update(terminationGracePeriodSeconds=30), "30 s of grace, 160 to drain"),
    ("time to drain", "gpu",
     lambda o: flag(target(o), "--drain-timeout=150", "--drain-timeout=300"), "310 to drain"),
    ("time to drain", "gpu", lambda o: first(draft(o)).pop("lifecycle"), "no preStop"),
    ("time to drain", "multi-node",
     lambda o: worker(o).update(terminationGracePeriodSeconds=90), "90 s of grace, 160 to drain"),
    ("time to drain", "gpu",
     lambda o: gateway(o).update(terminationGracePeriodSeconds=30), "30 s of grace, 160 to drain"),
    ("disruption budgets", "gpu",
     lambda o: drop(o, "PodDisruptionBudget", "ssd-draft"), "0 disruption budgets"),
    ("disruption budgets", "gpu", lambda o: budget(o).update(maxUnavailable=0), "can be drained"),
    ("disruption budgets", "gpu", lambda o: budget(o).update(minAvailable=2), "can be drained"),
    ("autoscaled sets own no number", "gpu",
     lambda o: named(o, "Deployment", "ssd-draft")["spec"].update(replicas=2), "take its number"),
    ("autoscaled sets own no number", "gpu",
     lambda o: drop(o, "Deployment", "ssd-draft"), "scales nothing"),
    ("spread over nodes", "gpu",
     lambda o: target(o).pop("topologySpreadConstraints"), "end up on one node"),
    ("drafts near targets", "gpu", lambda o: draft(o).pop("affinity"), "nowhere near"),
    ("selectors", "gpu",
     lambda o: named(o, "Service", "ssd-target")["spec"].update(selector={"app": "x"}),
     "Service/ssd-target: selects no pod"),
    ("selectors", "gpu",
     lambda o: named(o, "StatefulSet", "ssd-target")["spec"].update(selector={
         "matchLabels": {"app": "x"}}), "does not select its own pods"),
    ("selectors", "gpu", lambda o: drop(o, "Service", "ssd-target-headless"), "is not there"),
    ("selectors", "service-monitor",
     lambda o: named(o, "ServiceMonitor", "ssd-draft")["spec"]["endpoints"][0].update(port="http"),
     "has no port http"),
    ("selectors", "service-monitor",
     lambda o: drop(o, "Service", "ssd-draft-headless"), "selects 0 Services"),
    ("ports of services", "gpu",
     lambda o: first(target(o))["ports"].pop(1), "has no port metrics"),
    ("ports of services", "gpu",
     lambda o: named(o, "Service", "ssd-draft-headless")["spec"]["ports"][0].update(port=80),
     "headless, so that 80 is not 7420"),
    ("routes from outside", "http-route",
     lambda o: drop(o, "Service", "ssd-gateway"), "there is no ssd-gateway:443"),
    ("routes from outside", "http-route",
     lambda o: drop(o, "BackendTLSPolicy", "ssd-gateway"), "nothing says whom to expect"),
    ("secrets and claims", "gpu",
     lambda o: target(o)["volumes"].append({"name": "x", "secret": {
         "secretName": "forgotten", "optional": False, "defaultMode": 0o440}}),
     "nobody provides the Secret forgotten"),
    ("secrets and claims", "gpu",
     lambda o: [v["secret"].update(optional=True) for v in target(o)["volumes"] if "secret" in v],
     "would start without"),
    ("secrets and claims", "gpu",
     lambda o: [v["secret"].pop("defaultMode") for v in target(o)["volumes"] if "secret" in v],
     "everybody may read"),
    ("secrets and claims", "gpu",
     lambda o: drop(o, "PersistentVolumeClaim", "ssd-models"), "nobody makes the claim"),
    ("secrets and claims", "gpu", lambda o: target(o)["volumes"].pop(0), "no volume"),
    ("secrets and claims", "gpu",
     lambda o: [m.update(subPath="x") for m in first(target(o))["volumeMounts"]],
     "would never be updated"),
    ("files named by flags", "gpu",
     lambda o: flag(target(o), "--tls-key=/etc/ssd/tls/tls.key", "--tls-key=/etc/ssd/key.pem"),
     "nothing puts /etc/ssd/key.pem there"),
    ("files named by flags", "gpu",
     lambda o: first(draft(o))["args"].remove("--tls-ca=/etc/ssd/tls/ca.crt"),
     "is not secured by --tls-ca"),
    ("files named by flags", "gpu",
     lambda o: first(gateway(o))["args"].remove("--target-tls-ca=/etc/ssd/tls/ca.crt"),
     "is not secured by --target-tls-ca"),
    ("files named by flags", "gpu",
     lambda o: first(gateway(o))["args"].remove("--target-token-file=/etc/ssd/target-token/token"),
     "is not secured by --target-token-file"),
    ("files named by flags", "smoke-test",
     lambda o: named(o, "Job", "ssd-smoke-test")["spec"]["template"]["spec"]["containers"][0][
         "args"].remove("--token-file=/etc/ssd/token/token"), "is not secured by --token-file"),
    ("names in certificates", "cert-manager",
     lambda o: named(o, "Certificate", "ssd-draft")["spec"].update(dnsNames=["localhost"]),
     "is dialled as ssd-draft-headless"),
    ("names in certificates", "cert-manager",
     lambda o: named(o, "Certificate", "ssd-gateway")["spec"].update(dnsNames=["localhost"]),
     "is dialled as ssd-gateway.ssd.svc"),
    ("certificates of scrapers", "service-monitor",
     lambda o: named(o, "ServiceMonitor", "ssd-draft")["spec"]["endpoints"][0]["tlsConfig"].pop(
         "keySecret"), "shows no certificate, and Deployment/ssd-draft asks"),
    ("default deny", "gpu",
     lambda o: drop(o, "NetworkPolicy", "default-deny"), "denies everything"),
    ("default deny", "gpu",
     lambda o: policy(o, "ssd-draft").update(policyTypes=["Ingress"]), "says nothing of one"),
    ("default deny", "gpu",
     lambda o: policy(o, "ssd-target")["ingress"][0].pop("from"), "for everybody, or every port"),
    ("default deny", "gpu",
     lambda o: policy(o, "ssd-target")["egress"].append({
         "to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}],
         "ports": [{"protocol": "TCP", "port": 443}]}), "for everybody"),
    ("ports that are listened on", "gpu",
     lambda o: drop(o, "NetworkPolicy", "ssd-draft"), "no policy opens 7500 to 7599 (plane-ports)"),
    ("ports that are listened on", "gpu",
     lambda o: flag(target(o), "--metrics-listen=0.0.0.0:7411", "--metrics-listen=0.0.0.0:9090"),
     "no policy opens 9090 (metrics-listen)"),
    ("ports that are listened on", "gpu",
     lambda o: policy(o, "ssd-target")["ingress"][0]["ports"].append(
         {"protocol": "TCP", "port": 7412}), "opens its plain health port"),
    ("ports that are listened on", "multi-node",
     lambda o: drop(o, "NetworkPolicy", "ssd-target-nodes"), "(cluster-listen)"),
    ("nothing else is open", "gpu",
     lambda o: policy(o, "ssd-draft")["ingress"][0]["ports"].append(
         {"protocol": "TCP", "port": 22}), "opens 22, where nobody listens"),
    ("nothing else is open", "gpu",
     lambda o: policy(o, "ssd-target")["egress"][0]["ports"].append(
         {"protocol": "TCP", "port": 7421, "endPort": 7499}), "dial 7421 to 7499 of nobody"),
    ("who dials whom", "gpu",
     lambda o: policy(o, "ssd-target").update(egress=[]), "cannot look up ssd-draft-headless"),
    ("who dials whom", "gpu",
     lambda o: policy(o, "ssd-draft")["ingress"].pop(0),
     "no policy lets StatefulSet/ssd-target in at 7420"),
    ("who dials whom", "gpu",
     lambda o: policy(o, "ssd-target")["egress"][0]["ports"].pop(1), "dial 7500 to 7599 of"),
    ("who dials whom", "gpu",
     lambda o: drop(o, "Service", "ssd-draft-headless"), "which is no Service"),
    ("who dials whom", "gpu",
     lambda o: named(o, "Service", "ssd-draft-headless")["spec"].pop("clusterIP"),
     "one address, not for all"),
    ("who dials whom", "gpu",
     lambda o: policy(o, "ssd-target")["ingress"][0]["from"].pop(0),
     "no policy lets Deployment/ssd-gateway in at 7410"),
    ("who dials whom", "gpu",
     lambda o: policy(o, "ssd-gateway")["egress"].pop(0), "lets it dial 7410 of"),
    ("who dials whom", "one-gpu",
     lambda o: target(o)["containers"].pop(), "nobody in the pod listens on 7420"),
    ("who dials whom", "multi-node",
     lambda o: policy(o, "ssd-target-nodes")["ingress"].clear(), "in at 40000 to 40999"),
    ("who dials whom", "smoke-test",
     lambda o: policy(o, "ssd-target")["ingress"].pop(0), "lets Job/ssd-smoke-test in at 7410"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "overlay", "spoil", "words"), SPOILED)
def test_a_rule_that_is_broken_says_so(
    rule: str, overlay: str, spoil: Callable[[Manifests], object], words: str
) -> None:
    objects = manifests(overlay)
    spoil(objects)
    said = list(CHECKS[rule](objects))
    assert any(words in each for each in said), said


def test_every_rule_is_broken_by_some_test() -> None:
    assert {rule for rule, *_ in SPOILED} == set(CHECKS)
