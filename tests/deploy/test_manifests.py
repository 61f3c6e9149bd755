"""Every overlay builds, and a cluster would take what comes out."""

import copy
import json

import pytest

from tests.deploy.custom_resources import SPECS, fields
from tests.deploy.manifests import OVERLAYS, Manifest, Manifests, manifests, name, parse, pods
from tests.suite.scale import FULL
from tests.suite.tools import needs_tool, tool
from tools.render_manifests import (
    ALERTS,
    DEPLOY,
    RULES,
    build,
    digest,
    rendered,
    rules,
    sources,
)

# The oldest that docs/deploy.md promises, and current ones.
KUBERNETES = ("1.34", "1.36", "1.37") if FULL else ("1.36",)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_the_other_tests_look_at_is_what_the_sources_say(overlay: str) -> None:
    first = rendered(overlay).read_text().partition("\n")[0]
    assert digest() in first, "deploy/ was changed: run make manifests, where kubectl is installed"


@needs_tool("kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_builds_and_is_what_the_other_tests_look_at(overlay: str) -> None:
    assert parse(build(overlay, tool("kubectl"))) == manifests(overlay), "run make manifests"


def test_no_build_of_an_overlay_is_left_over() -> None:
    assert sorted(each.stem for each in rendered("x").parent.iterdir()) == OVERLAYS


def validate(manifest: Manifest) -> None:
    """Strictly: a field that the API does not know is an error."""
    import jsonschema  # takes seconds, which other workers need not spend
    import kubernetes_validate

    kind = manifest["apiVersion"], manifest["kind"]
    if kind in SPECS:
        whole = fields("metadata spec", apiVersion={}, kind={}, metadata={}, spec=SPECS[kind])
        jsonschema.validate(manifest, whole)
    else:
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)


def unique(objects: Manifests) -> Manifests:
    return [json.loads(each) for each in {json.dumps(one, sort_keys=True) for one in objects}]


def test_manifests_are_valid_strictly() -> None:
    """Overlays share most of them, and each is validated once."""
    everything = unique([one for overlay in OVERLAYS for one in manifests(overlay)])
    assert len(everything) > 30
    made = [  # by custom resources
        {"spec": pod.spec, "metadata": {"name": "x", **pod.template["metadata"]}}
        for pod in pods(everything)
        if pod.part
    ]
    assert made
    for each in (*everything, *({"apiVersion": "v1", "kind": "Pod", **pod} for pod in made)):
        validate(each)


def test_validation_knows_its_fields() -> None:
    by_kind = {(one["apiVersion"], one["kind"]): one for o in OVERLAYS for one in manifests(o)}
    for kind in (("apps/v1", "StatefulSet"), *(SPECS.keys() & by_kind.keys())):
        spoiled = copy.deepcopy(by_kind[kind])
        spoiled["spec"]["replica"] = 2
        with pytest.raises(Exception, match=r"replica|is not valid under any"):
            validate(spoiled)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_is_in_one_namespace_and_named_once(overlay: str) -> None:
    objects = manifests(overlay)
    titles = [name(each) for each in objects]
    assert len(titles) == len(set(titles))
    rest = [each for each in objects if each["kind"] != "Namespace"]
    assert {each["metadata"]["namespace"] for each in rest} == {"ssd"}
    assert "pod-security.kubernetes.io/enforce" in json.dumps(objects)


# --- the sources, as far as they can be looked at without kubectl --------------------------------


def test_every_file_is_part_of_a_build_and_every_name_is_a_file() -> None:
    known = {file.resolve() for file in sources()}
    reached = {DEPLOY / "overlays" / each / "kustomization.yaml" for each in OVERLAYS}
    for file in (each for each in known if each.name == "kustomization.yaml"):
        (content,) = parse(file.read_text())
        entries = [each["path"] for each in content.get("patches", ()) if "path" in each]
        entries += [*content.get("resources", ()), *content.get("components", ())]
        paths = [(file.parent / entry).resolve() for entry in entries]
        assert [path for path in paths if not path.exists()] == [], file
        reached |= {path / "kustomization.yaml" if path.is_dir() else path for path in paths}
        inside = "components" in file.relative_to(DEPLOY.resolve()).parts[:-1]
        assert content["kind"] == ("Component" if inside else "Kustomization"), file
    assert known <= {path.resolve() for path in reached}


def test_every_source_is_yaml_that_says_what_it_is() -> None:
    for file in sources():
        for document in parse(file.read_text()):
            if isinstance(document, list):  # operations on fields of another file's object
                assert all({"op", "path"} <= each.keys() for each in document), file
            else:
                assert {"apiVersion", "kind"} <= document.keys(), file


def test_the_operator_gets_the_alerts_that_are_tested() -> None:
    assert RULES.read_text() == rules(ALERTS.read_text()), "run make manifests"
