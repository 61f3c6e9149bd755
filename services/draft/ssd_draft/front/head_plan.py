"""A head as what a draft serves: checked before anything is loaded."""

from dataclasses import dataclass, replace
from pathlib import Path

from ssd_draft.config import (
    CONTEXT_WITHOUT_MODEL,
    INBOX_BYTES,
    WAITING_BYTES,
    DraftConfig,
    DraftHead,
)
from ssd_engine.checkpoints.files.model_files import is_there
from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import (
    HeadConfig,
    fit_to_target,
    load_head_config,
    parse_aux_layers,
)
from ssd_engine.checkpoints.heads.head_expansion import (
    count_head_parameters,
    grow_head,
    shape_of_head,
)
from ssd_engine.checkpoints.model_config import ModelConfig, load_model_config
from ssd_engine.checkpoints.model_store import resolve_model, shipped_models
from ssd_engine.checkpoints.tokenizer_files import TOKENIZER, count_tokens
from ssd_engine.errors import ConfigError
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.speculation.features import FeatureNeeds
from ssd_engine.tensor_plane.protocol.streams import VALUE_BYTES
from ssd_engine.text.tokenizer import Tokenizer
from ssd_serving.config import StepSizes, runner_options
from ssd_serving.plan import ModelPlan


@dataclass(frozen=True, kw_only=True)
class DraftHeadPlan(ModelPlan):
    """``model`` is that of the head's layers, with the target's tokens."""

    head: DraftHead
    tokenizer_directory: Path
    max_context: int  # tokens of a sequence: what is beyond the head's own is left out of its text

    @property
    def num_parameters(self) -> int:
        return count_head_parameters(
            grow_head(self.head.config, self.runner.expand_to), self.checkpoint
        )

    def _shapes(self) -> tuple[object, ...]:
        """What the head computes beside its layers; whom it was trained for is a name alone."""
        return (*super()._shapes(), replace(self.head.config, verifier=""))

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer(self.tokenizer_directory, self.model)

    def __str__(self) -> str:
        boundaries = ", ".join(map(str, self.head.needs.boundaries))
        millions = f"{self.num_parameters / 1e6:.1f}M parameters"
        return f"{self.name}, a head of {millions} that reads boundaries {boundaries}"


def plan_head(config: DraftConfig, directory: Path, sizes: StepSizes) -> DraftHeadPlan:
    """Raises SSDError for a head that cannot be served, and for options that are none of it."""
    _check_options(config, directory)
    head = load_head_config(directory, parse_aux_layers(config.aux_layers))
    target = _target_of(config, head)
    model = None if target is None else load_model_config(target)
    if target is not None and model is not None:
        head = fit_to_target(head, model, target.name)
    if head.boundaries is None:
        raise ConfigError(
            f"{directory} does not say which hidden states it reads, and its target's layers are "
            "not known: name its target's directory by --target-model, or use --aux-layers"
        )
    checkpoint = open_head(directory, head, target)
    runner = runner_options(config, head.layers, directory, sizes)
    runner = replace(runner, expand_to=shape_of_head(runner.expand_to))
    _check_depth(config, runner, directory)
    options = _options(config, head, target, runner)
    runner = replace(runner, told_bytes=_told_bytes(config, options.needs))
    return DraftHeadPlan(
        name=config.name or directory.name,
        model=_with_tokens(head, directory, model),
        checkpoint=checkpoint.weights,
        runner=runner,
        head=options,
        tokenizer_directory=_tokenizer_directory(directory, target, model),
        max_context=CONTEXT_WITHOUT_MODEL if model is None else model.max_position_embeddings,
    )


def _check_options(config: DraftConfig, directory: Path) -> None:
    if config.tp > 1:
        raise ConfigError(
            f"--tp {config.tp}: {directory.name} is a head, which one rank runs: leave out --tp"
        )


def _target_of(config: DraftConfig, head: HeadConfig) -> Path | None:
    """The target's directory: the one that is named, or a shipped one that the head names."""
    if config.target_model is not None:
        return resolve_model(config.target_model)
    return resolve_model(head.verifier) if head.verifier in shipped_models() else None


def _check_depth(config: DraftConfig, runner: RunnerOptions, directory: Path) -> None:
    """A text that has outgrown the head begins again with half of its context at most."""
    longest = (runner.max_model_len - 1) // 2 - 2
    if config.depth > longest:
        raise ConfigError(
            f"--depth {config.depth}: {directory.name} has a context of {runner.max_model_len} "
            f"tokens, which has room for branches of {longest}"
        )


def _with_tokens(head: HeadConfig, directory: Path, target: ModelConfig | None) -> ModelConfig:
    """The head's layers, and the tokens of its target without its padding."""
    if target is not None:
        return replace(
            head.layers,
            vocab_size=target.vocab_size,
            head_rows=target.vocab_size,
            eos_token_ids=target.eos_token_ids,
        )
    most = head.layers.vocab_size
    tokens = min(count_tokens(directory) or most, most)
    return replace(head.layers, vocab_size=tokens, head_rows=tokens)


def _options(
    config: DraftConfig, head: HeadConfig, target: Path | None, runner: RunnerOptions
) -> DraftHead:
    width = grow_head(head, runner.expand_to).target_hidden_size
    needs = FeatureNeeds(tuple(head.boundaries or ()), width, runner.dtype)
    return DraftHead(head, target, needs, config.feature_window)


def _told_bytes(config: DraftConfig, needs: FeatureNeeds) -> int:
    """What features take where the head computes: the windows of all sequences, and what one link
    may have on its way to them."""
    row = needs.width * VALUE_BYTES[needs.dtype]
    return config.max_num_seqs * config.feature_window * row + INBOX_BYTES + WAITING_BYTES


def _tokenizer_directory(directory: Path, target: Path | None, model: ModelConfig | None) -> Path:
    """The head's, if it has a tokenizer, which must be its target's; else its target's."""
    has_own = is_there(directory / TOKENIZER)
    if target is None or model is None:
        if not has_own:
            raise ConfigError(
                f"{directory} has no {TOKENIZER}, as most heads have none: name its target's "
                "directory by --target-model"
            )
        return directory
    if has_own and (
        Tokenizer(directory, model).fingerprint != Tokenizer(target, model).fingerprint
    ):
        raise ConfigError(f"--target-model: {target.name} has another tokenizer than the head")
    return directory if has_own else target
