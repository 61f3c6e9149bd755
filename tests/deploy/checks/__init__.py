"""What we ask of manifests beyond their schema. A check says what is wrong; nothing is fine."""

from collections.abc import Callable, Iterator, Mapping

from tests.deploy.checks import lifecycle, network, pods, references
from tests.deploy.manifests import Manifests

Check = Callable[[Manifests], Iterator[str]]
CHECKS: Mapping[str, Check] = {
    "security contexts": pods.security,
    "no account token": pods.no_account_token,
    "requests and limits": pods.resources,
    "temporary volumes are bounded": pods.temporary_volumes,
    "a read-only root, and room to write": pods.writable_places,
    "one rank for each GPU": pods.ranks,
    "images of this version": pods.images,
    "health probes": lifecycle.probes,
    "time to load": lifecycle.time_to_load,
    "time to drain": lifecycle.time_to_drain,
    "disruption budgets": lifecycle.disruption_budgets,
    "autoscaled sets own no number": lifecycle.autoscaled,
    "spread over nodes": lifecycle.spread,
    "drafts near targets": lifecycle.near_targets,
    "selectors": references.selectors,
    "ports of services": references.service_ports,
    "routes from outside": references.routes,
    "secrets and claims": references.volumes,
    "files named by flags": references.files,
    "names in certificates": references.certificates,
    "certificates of scrapers": references.scrapers,
    "default deny": network.default_deny,
    "ports that are listened on": network.ports_are_covered,
    "nothing else is open": network.nothing_else_is_open,
    "who dials whom": network.dialled,
}
