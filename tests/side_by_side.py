"""Which tests a worker runs one after the other, and which files come first.

A file stays on one worker, and so do files whose tests share services: each worker would start
those services for itself. Where tests share nothing and take long, each goes by itself.
"""

from typing import Any

# Files by the services that they share; conftest.py of their folder starts them.
SERVICES = {
    "pair": (
        "speculation/test_never_in_the_way.py",
        "speculation/test_shared_endpoints.py",
        "speculation/test_speculation_service.py",
        "speculation/test_hostile_target.py",
        "speculation/test_grammars.py",
    ),
    "victims": (
        "wire/test_fuzz.py",
        "wire/test_fuzz_links.py",
        "wire/test_slow_readers.py",
        "wire/test_transport.py",
        "wire/test_version_skew.py",
    ),
    "shown": (
        "client/openai/test_gateway_client.py",
        "client/test_commands_on_services.py",
        "repository/test_readme.py",
        "speculation/test_traces.py",
        "target/test_bad_input.py",
        "target/test_exactness.py",
    ),
    "attacked": (
        "attacks/test_cancel_storm.py",
        "attacks/test_forged_turns.py",
        "attacks/test_guessed_prompts.py",
        "attacks/test_huge_prompts.py",
        "attacks/test_long_prompts.py",
        "attacks/test_refusals.py",
        "attacks/test_revocation.py",
    ),
    "fronted": (
        "gateway/test_openai_sdk.py",
        "gateway/test_gateway_lifecycle.py",
        "gateway/http/test_hostile_http.py",
        "gateway/page/test_page_chat.py",
        "gateway/page/test_page_look.py",
        "gateway/page/test_page_observation.py",
        "gateway/page/test_page_origins.py",
        "gateway/page/test_page_race.py",
        "gateway/page/test_page_safety.py",
        "gateway/page/test_page_structured.py",
    ),
    "watched": (
        "deploy/test_logs.py",
        "deploy/test_observability.py",
        "deploy/test_request_traces.py",
    ),
}
_SHARED = {file: services for services, files in SERVICES.items() for file in files}

APART = (
    "speculation/test_exact_under_every_fault.py",
    "speculation/test_heads_under_every_fault.py",
)

# Files that take longest, the longest first: no worker is left alone with one at the end.
LONGEST = (
    "speculation/test_protocol_explored.py",
    *SERVICES["pair"],
    *SERVICES["shown"],
    "speculation/test_soak.py",
    "speculation/test_heads_under_every_fault.py",
    "speculation/test_exact_under_every_fault.py",
    "attacks/test_frozen_engine.py",
    "gateway/test_gateway_failover.py",
    "speculation/test_head_service.py",
    "speculation/test_rolling_restart.py",
    *SERVICES["victims"],
    *SERVICES["fronted"],
    "engine/execution/test_step.py",
    "engine/execution/test_step_features.py",
    "engine/execution/test_head_step.py",
    "speculation/test_rejection_end_to_end.py",
    *SERVICES["watched"],
    "client/local/test_launcher.py",
    "engine/parallel/nodes/test_nodes.py",
    "engine/self_check/test_check.py",
    "repository/test_packaging.py",
    "engine/kernels/products/test_cuda_sources.py",
    "engine/kernels/sampling/test_drawn_on_device.py",
    "engine/kernels/products/test_streamed_products.py",
    "repository/test_types.py",
    "target/front/test_service.py",
    "target/test_lifecycle.py",
    "speculation/test_never_garbage.py",
    "attacks/test_broken_models.py",
    "speculation/test_rows_of_a_batch.py",
    "speculation/test_grown_pair.py",
    "engine/models/test_models.py",
    "engine/checkpoints/test_model_expansion.py",
)


def group(node_id: str) -> str:
    """Tests of one group run on one worker."""
    file = _file(node_id)
    return node_id if file in APART else _SHARED.get(file, file)


def place_in_order(node_id: str) -> int:
    file = _file(node_id)
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def scheduler(config: Any, log: Any) -> Any:
    """For pytest-xdist, which may not be installed."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False  # the order is ours
    return GroupScheduling(config, log)


def _file(node_id: str) -> str:
    return node_id.split("::", 1)[0].removeprefix("tests/")
