"""How one request draws its tokens, and what it is told of them. Plain data, no torch."""

import math
from dataclasses import dataclass, fields

from ssd_engine.errors import InputError
from ssd_engine.grammar.spec import Grammar

MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-3  # below it, and above 0, logits overflow float32
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_ADDITIVE_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_BANNED_TOKENS = 1024
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()  # tokens that are not drawn
    banned_until: int = 0  # at absolute positions before this one
    grammar: Grammar | None = None  # that the text follows

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        neutral = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return neutral != (1.0, 0.0, 0.0)

    @property
    def adjusts_logits(self) -> bool:
        return self.penalised or bool(self.logit_bias) or bool(self.banned)

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


NO_OPTIONS = ("seed", "logit_bias", "banned", "banned_until", "grammar")
# What a request may leave to the server, in the order of the fields.
OPTION_NAMES = tuple(field.name for field in fields(SamplingParams) if field.name not in NO_OPTIONS)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities in one place: of the chosen token and of the most likely ones."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise InputError for the first value out of bounds; NaN is out of every bound."""
    if params.temperature != 0.0:
        _within("temperature", params.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, "0 or ")
    if not 0 <= params.top_k <= vocab_size:
        raise InputError(
            "sampling.top_k",
            f"must be in [0, {vocab_size}] (the vocabulary; 0 keeps all), got {params.top_k}",
        )
    if not 0.0 < params.top_p <= 1.0:
        raise InputError("sampling.top_p", f"must be in (0, 1], got {params.top_p:g}")
    _within("min_p", params.min_p, 0.0, 1.0)
    _within(
        "repetition_penalty",
        params.repetition_penalty,
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
    )
    for name in ("presence_penalty", "frequency_penalty"):
        _within(name, getattr(params, name), -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)
    _check_bias(params.logit_bias, vocab_size)


def _within(name: str, value: float, low: float, high: float, prefix: str = "") -> None:
    if not low <= value <= high:
        raise InputError(
            f"sampling.{name}", f"must be {prefix}in [{low:g}, {high:g}], got {value:g}"
        )


def check_bias_size(entries: int) -> None:
    if entries > MAX_LOGIT_BIAS_ENTRIES:
        raise InputError(
            "sampling.logit_bias", f"at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {entries}"
        )


def _check_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    check_bias_size(len(bias))
    for token, value in bias:
        if not 0 <= token < vocab_size:
            raise InputError(
                "sampling.logit_bias", f"token {token} is not in the vocabulary [0, {vocab_size})"
            )
        if math.isnan(value) or abs(value) > MAX_LOGIT_BIAS:
            raise InputError(
                "sampling.logit_bias",
                f"value of token {token} must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], "
                f"got {value:g}",
            )
