"""The software bill of materials: what an installation of ours brings along, as CycloneDX JSON.

    python -m tools.sbom --out build/sbom.json [--extra serve]

It is made from what is installed here, without a network: exactly the packages that the chosen
extras need, with those that they need in turn.
"""

import argparse
import tomllib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CLASSIFIER = "License :: OSI Approved :: "
Needed = dict[str, set[str]]  # package, and the packages that it needs


class Missing(Exception):
    """A package that would be part of the bill is not installed."""


def project_requirements(extras: Iterable[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chosen = [each for extra in extras for each in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *chosen]


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """On this machine, of a package that was asked for with these extras."""
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def closure(requirements: Iterable[str]) -> Needed:
    needed: Needed = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(each) for each in requirements]
    waiting = [each for each in waiting if applies(each, ())]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        asked = name, frozenset(requirement.extras)
        if asked in seen:
            continue
        seen.add(asked)
        own = [Requirement(each) for each in distribution(name).requires or ()]
        own = [each for each in own if applies(each, requirement.extras)]
        needed.setdefault(name, set()).update(canonicalize_name(each.name) for each in own)
        waiting += own
    return needed


def distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise Missing(f"{name} is not installed: install the extras that are asked for") from None


def licence(about: metadata.PackageMetadata) -> str:
    """As the package states it: an SPDX expression, a name, or a classifier."""
    stated = [*(about.get_all("License-Expression") or ()), *(about.get_all("License") or ())]
    kinds = [c for c in about.get_all("Classifier") or () if c.startswith(CLASSIFIER)]
    named = " OR ".join(each.removeprefix(CLASSIFIER) for each in kinds)
    return stated[0].partition("\n")[0] if stated else named


def component(name: str) -> Component:
    found = distribution(name)
    stated = licence(found.metadata)
    return Component(
        name=name,
        version=found.version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}@{found.version}",
        purl=PackageURL("pypi", name=name, version=found.version),
        licenses=[_licence(stated)] if stated else [],
    )


def _licence(stated: str) -> License:
    return LicenseFactory().make_from_string(stated)


def make_bom(extras: Iterable[str]) -> Bom:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project_requirements(extras)
    needed = closure(requirements)
    bom = Bom()
    bom.metadata.component = root = Component(
        name=project["name"],
        version=project["version"],
        type=ComponentType.APPLICATION,
        licenses=[_licence(project["license"])],
        purl=PackageURL("pypi", name=project["name"], version=project["version"]),
    )
    components = {name: component(name) for name in sorted(needed)}
    bom.components.update(components.values())
    direct = {canonicalize_name(Requirement(each).name) for each in requirements}
    bom.register_dependency(root, [components[name] for name in sorted(direct & needed.keys())])
    for name, others in needed.items():
        bom.register_dependency(components[name], [components[other] for other in sorted(others)])
    return bom


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--extra", action="append", help="may be repeated; default: serve")
    options = parser.parse_args(arguments)
    try:
        bom = make_bom(options.extra or ["serve"])
    except Missing as error:
        raise SystemExit(f"error: {error}") from None
    options.out.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")
    print(f"{options.out}: {len(bom.components)} packages")


if __name__ == "__main__":
    main()
