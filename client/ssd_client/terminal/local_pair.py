"""A --local target that knows every mode: a draft runs beside it, and the draft's model inside."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Mapping
from typing import Any

import click

from ssd_client.local.launcher import (
    DEFAULT_DRAFTS,
    DEFAULT_MODEL,
    NO_DRAFT,
    LocalFlags,
    LocalPlan,
    plan_local,
)
from ssd_client.terminal import params
from ssd_client.terminal.options import LOCAL, local_options, local_service_options, options
from ssd_client.terminal.serving import pick

_grown_options = options(
    LOCAL,
    click.option(
        "--local-expand-to", type=params.UTF8, help="Grow the target of --local to this shape."
    ),
    click.option(
        "--local-draft-expand-to", type=params.UTF8, help="Grow the draft of --local, likewise."
    ),
    click.option(
        "--local-target-options",
        type=params.Parsed(shlex.split, "options"),
        help="More options of the target of --local.",
    ),
    click.option(
        "--local-draft-options",
        type=params.Parsed(shlex.split, "options"),
        help="More options of the draft of --local.",
    ),
)
pair_options = options(LOCAL, local_options, _grown_options)
pair_service_options = options(LOCAL, local_service_options, _grown_options)


def plan_pair(flags: Mapping[str, Any], modes: Collection[str], named: bool) -> LocalPlan:
    """Plans for these modes. `named`: the user said them; else, where one GPU has no room for both,
    ssd is left out."""
    name = flags["local_draft"] or DEFAULT_DRAFTS.get(flags["local_model"] or DEFAULT_MODEL)
    model = None if name == NO_DRAFT else name
    named_ssd = named and "ssd" in modes and model is not None
    mode = "off" if "ssd" not in modes else "ssd" if named_ssd else None
    plan = plan_local(pick(LocalFlags, {**flags, "mode": mode, "draft": ()}))
    target: list[str] = []
    if "sync" in modes and model is not None and "--draft-model" not in plan.target_flags:
        target += ["--draft-model", model]
        target += _grown("--draft-expand-to", flags["local_draft_expand_to"])
    draft = _grown("--expand-to", flags["local_draft_expand_to"])
    return dataclasses.replace(
        plan,
        target_flags=(*plan.target_flags, *target, *target_flags(flags)),
        draft_flags=(*plan.draft_flags, *draft, *(flags["local_draft_options"] or ())),
    )


def target_flags(flags: Mapping[str, Any]) -> list[str]:
    """What was said of the target alone."""
    shape = _grown("--expand-to", flags["local_expand_to"])
    return [*shape, *(flags["local_target_options"] or ())]


def _grown(flag: str, shape: str | None) -> list[str]:
    return [] if shape is None else [flag, shape]
