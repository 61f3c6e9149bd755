"""A sequence: one request inside the engine."""

from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass
from enum import Enum

from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.kvcache.block_pool import BlockLease
from ssd_engine.sampling.history import History
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.text.completion import Completion, StopRules
from ssd_target.records.speculation_options import SpeculationRequest


class SequenceState(Enum):
    WAITING = "waiting"  # holds nothing: has not begun, or was set aside
    PREFILL = "prefill"  # holds blocks; some of its committed tokens are not in the cache yet
    REPLAY = "replay"  # the same, and those are not the prompt's: steps compute them again
    DECODE = "decode"  # all committed tokens but the last are in the cache
    FINISHED = "finished"  # holds nothing


class SequenceEvent(Enum):
    ADMIT = "admit"
    PREFILLED = "prefilled"
    REPLAY = "replay"  # the prompt is prefilled, tokens that were generated before are left
    REPLAYED = "replayed"
    SET_ASIDE = "set aside"  # others need its blocks
    END = "end"  # finished, cancelled or failed


TRANSITIONS = {
    (SequenceState.WAITING, SequenceEvent.ADMIT): SequenceState.PREFILL,
    (SequenceState.WAITING, SequenceEvent.END): SequenceState.FINISHED,
    (SequenceState.PREFILL, SequenceEvent.PREFILLED): SequenceState.DECODE,
    (SequenceState.PREFILL, SequenceEvent.REPLAY): SequenceState.REPLAY,
    (SequenceState.PREFILL, SequenceEvent.SET_ASIDE): SequenceState.WAITING,
    (SequenceState.PREFILL, SequenceEvent.END): SequenceState.FINISHED,
    (SequenceState.REPLAY, SequenceEvent.REPLAYED): SequenceState.DECODE,
    (SequenceState.REPLAY, SequenceEvent.SET_ASIDE): SequenceState.WAITING,
    (SequenceState.REPLAY, SequenceEvent.END): SequenceState.FINISHED,
    (SequenceState.DECODE, SequenceEvent.SET_ASIDE): SequenceState.WAITING,
    (SequenceState.DECODE, SequenceEvent.END): SequenceState.FINISHED,
}


def transition(state: SequenceState, event: SequenceEvent) -> SequenceState:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"a {state.value} sequence cannot {event.value}") from None


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of its KV, in the host's memory, while it is set aside."""

    places: range
    num_written: int  # tokens


class Sequence:
    def __init__(
        self,
        sequence_id: int,
        prompt: list[int],
        generated: list[int],
        sampling: SamplingParams,
        rules: StopRules,
        num_logprobs: int | None,
        token_bytes: TokenSequence[bytes],
        owner: str = "",
        scope: str = "",
        speculation: SpeculationRequest | None = None,
        prompt_logprobs: int | None = None,
        grammar: GrammarFollower | None = None,
    ) -> None:
        """``owner``: the identity whose request it is. ``scope``: within which its prefix may be
        shared."""
        self.id, self.owner, self.scope = sequence_id, owner, scope
        self.speculation = speculation  # that it asks for, until it begins, or begins again
        self.prompt = prompt
        self.output: list[int] = []
        self.sampling = sampling
        self.max_committed = len(prompt) + rules.max_tokens
        self.num_logprobs = num_logprobs  # None: no logprobs; n: the chosen token's and the top n
        self.prompt_logprobs = prompt_logprobs  # the same of the tokens of its prompt
        self.num_scored = 0  # tokens of the prompt, the first ones, after which these were told
        self.history = History.of(sampling, prompt, self.output, grammar)
        self.grammar = grammar
        self.state = SequenceState.WAITING
        self.lease: BlockLease | None = None
        self.num_written = 0  # tokens whose KV is in the cache
        self.num_cached_tokens = 0  # those of them that were found there when it began
        self.room = 0  # tokens that its blocks hold, those that are reserved included; or less
        self.arrival = 0  # its place in the order of requests
        self.stays = 0  # how often it was admitted
        self.kept: Kept | None = None
        self.begun_at: float | None = None  # its prefill; until its first tokens are out
        self.completion = Completion(rules, token_bytes, wants_text=False)
        for token in generated:
            self.commit(token)

    @property
    def num_committed(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def last_token(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def blocks(self) -> list[int]:
        return self.lease.blocks if self.lease else []

    @property
    def finished(self) -> bool:
        return self.completion.finish is not None

    @property
    def left_to_score(self) -> int:
        """Tokens of the prompt after which log probabilities are to be told. The prompt is computed
        for it, whatever is cached."""
        last = 0 if self.prompt_logprobs is None else len(self.prompt) - 1
        return last - self.num_scored

    @property
    def ends_with_next(self) -> bool:
        """Whether its next token is the last, whatever it is."""
        return self.num_committed + 1 >= self.max_committed

    def committed(self) -> list[int]:
        return self.prompt + self.output

    def commit(self, token: int) -> None:
        self.output.append(token)
        self.completion.push(token)

    def move(self, event: SequenceEvent) -> None:
        self.state = transition(self.state, event)
