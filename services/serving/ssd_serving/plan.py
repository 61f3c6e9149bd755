"""A model that was checked against the options, before anything is loaded."""

import hashlib
from dataclasses import dataclass

from ssd_engine.checkpoints.checkpoint import Checkpoint, open_checkpoint
from ssd_engine.checkpoints.generation_config import NEUTRAL, SamplingDefaults
from ssd_engine.checkpoints.heads.head_config import is_head
from ssd_engine.checkpoints.model_config import ModelConfig, load_model_config
from ssd_engine.checkpoints.model_expansion import count_parameters, grow_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.text.tokenizer import ChatTemplate, Tokenizer
from ssd_serving.config import ServiceConfig, StepSizes, runner_options

DIGEST_VERSION = 2  # changes with what is digested, and how


@dataclass(frozen=True)
class ModelPlan:
    name: str
    model: ModelConfig  # the checkpoint's own shape
    checkpoint: Checkpoint
    runner: RunnerOptions
    sampling: SamplingDefaults = NEUTRAL  # a target's
    chat_template: ChatTemplate | None = None  # likewise; None: the model's own
    allow_control_tokens: bool = False  # in messages of chats; likewise

    @property
    def grown(self) -> ModelConfig:
        """The shape that is served."""
        shape = self.runner.expand_to
        return self.model if shape is None else grow_config(self.model, shape)

    @property
    def num_parameters(self) -> int:
        shape = self.runner.expand_to
        if shape is None:
            return self.checkpoint.num_parameters
        return count_parameters(grow_config(self.model, shape))

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer(
            self.runner.directory, self.model, self.chat_template, self.allow_control_tokens
        )

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """Equal for servers on which one request has one text, up to the order of additions; of
        the weights a sample is looked at."""
        return self._described(tokenizer, self.checkpoint.fingerprint)

    def digest(self, tokenizer: Tokenizer) -> str:
        """The same over every byte of the weights. It takes a while."""
        return f"{DIGEST_VERSION}-{self._described(tokenizer, self.checkpoint.digest)}"

    def _described(self, tokenizer: Tokenizer, weights: str) -> str:
        parts = (
            weights,
            tokenizer.text_fingerprint,
            self.model,
            self.sampling,
            self.runner.dtype,
            self.runner.expand_to,
            *self._shapes(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _shapes(self) -> tuple[object, ...]:
        """On a CUDA device the bits of a row depend on the shapes of forwards, too."""
        runner = self.runner
        if runner.device != "cuda" or not runner.step_rows:
            return ()
        return (
            runner.device,
            runner.kernels,
            runner.exact,
            runner.max_model_len,
            runner.max_num_seqs,
            runner.step_rows,
            runner.max_forward_tokens,
        )

    def describe(self, num_blocks: int, ranks: int) -> list[str]:
        """A few lines for the log, the model first."""
        runner = self.runner
        tokens, context = num_blocks * runner.block_size, runner.max_model_len
        where = f"{ranks} ranks on {runner.device}" if ranks > 1 else f"on {runner.device}"
        named = f", devices {','.join(map(str, runner.devices))}" if runner.devices else ""
        return [
            str(self),
            f"{runner.dtype} {where}{named}",
            f"KV cache of {tokens:,} tokens: {tokens // context:,} sequences of the full context "
            f"of {context:,}; {runner.max_num_seqs} run at a time",
        ]

    def __str__(self) -> str:
        return f"{self.name}, {self.num_parameters / 1e6:.1f}M parameters"


def plan_model(model: str, config: ServiceConfig, sizes: StepSizes) -> ModelPlan:
    """Raise SSDError for whatever can be known to be wrong without loading weights."""
    directory = resolve_model(model)
    if is_head(directory):
        raise ConfigError(
            f"{directory} is an EAGLE-3 head, and no model by itself: name it to its target, as "
            "--draft-model, or serve it by ssd-draft"
        )
    model_config = load_model_config(directory)
    return ModelPlan(
        name=config.name or directory.name,
        model=model_config,
        checkpoint=open_checkpoint(directory, model_config),
        runner=runner_options(config, model_config, directory, sizes),
    )
