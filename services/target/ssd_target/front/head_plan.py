"""A head as the draft inside a target: checked against it before anything is loaded."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from ssd_engine.checkpoints.files.model_files import is_there
from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import (
    fit_to_target,
    load_head_config,
    parse_aux_layers,
)
from ssd_engine.checkpoints.heads.head_expansion import (
    count_head_parameters,
    grow_head,
    shape_of_head,
)
from ssd_engine.errors import ConfigError
from ssd_engine.text.tokenizer import Tokenizer
from ssd_serving.config import StepSizes, runner_options
from ssd_serving.plan import ModelPlan
from ssd_target.config import HeadOptions, TargetConfig, head_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadPlan:
    name: str
    num_parameters: int
    options: HeadOptions

    def __str__(self) -> str:
        boundaries = ", ".join(map(str, self.options.config.boundaries or ()))
        millions = f"{self.num_parameters / 1e6:.1f}M parameters"
        return f"{self.name}, a head of {millions} that reads boundaries {boundaries}"


def plan_head(config: TargetConfig, directory: Path, target: ModelPlan, max_rows: int) -> HeadPlan:
    """Raises SSDError for a head that does not fit its target."""
    if config.draft_expand_to is not None:
        raise ConfigError(
            f"--draft-expand-to: {directory.name} is an EAGLE-3 head, which grows as its target "
            "does: leave it out"
        )
    head = load_head_config(directory, parse_aux_layers(config.aux_layers))
    head = fit_to_target(head, target.model, target.name)
    if head.verifier and PurePath(head.verifier).name != target.runner.directory.name:
        log.warning("%s was trained for %s, not %s", directory.name, head.verifier, target.name)
    _check_tokenizer(directory, target)
    checkpoint = open_head(directory, head, target.runner.directory)
    own = replace(
        config,
        name=None,
        tp=1,
        nodes=1,
        devices=config.devices and config.devices.split(",")[0],  # that of the first rank
        num_kv_blocks=None,
        dtype=target.runner.dtype,
    )
    longest = min(target.runner.max_model_len, head.layers.max_position_embeddings)
    if longest <= 2 * config.depth:  # half of it is read again where a text has outgrown it
        raise ConfigError(
            f"--depth {config.depth}: {directory.name} has a context of {longest} tokens, which "
            f"has room for speculations of {(longest - 1) // 2}"
        )
    depth = config.depth
    sizes = StepSizes(max_rows, exact=False, step_rows=depth + 1, ranks=2, max_path=depth)
    runner = runner_options(replace(own, max_model_len=longest), head.layers, directory, sizes)
    runner = replace(runner, expand_to=shape_of_head(target.runner.expand_to))
    kept = head_bytes(config, head, target.grown.hidden_size, target.runner.dtype)
    options = HeadOptions(head, target.runner.directory, runner, kept)
    parameters = count_head_parameters(grow_head(head, runner.expand_to), checkpoint.weights)
    return HeadPlan(directory.name, parameters, options)


def _check_tokenizer(directory: Path, target: ModelPlan) -> None:
    """Most heads come without one."""
    if not is_there(directory / "tokenizer.json"):
        return
    if Tokenizer(directory, target.model).fingerprint != target.load_tokenizer().fingerprint:
        raise ConfigError(f"--draft-model: {directory.name} has another tokenizer than its target")
