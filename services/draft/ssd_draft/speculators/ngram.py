"""Look-up in prompt and output: no model, no device, instant."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ssd_draft.config import DraftEngineOptions
from ssd_draft.planning.plan import RoundPlan
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence, PreparedBranch
from ssd_draft.speculators.base import CannotSpeculate, ReadsNoFeatures
from ssd_engine.kvcache.cached_path import NoRoom
from ssd_engine.speculation.ngram import NgramIndex
from ssd_engine.tensor_plane.protocol.rows import MakeRows

MOST_TOKENS = 1 << 20  # tokens of all sequences: an index takes about 1 KB for each


class NgramSpeculator(ReadsNoFeatures):
    """Looks up what followed in a sequence's own text. The text is indexed piece by piece, one in a
    step, as a model reads its prompt: long sequences do not hold up others."""

    is_typical = True
    pool = None

    def __init__(self, max_tokens: int = MOST_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._held = 0  # tokens of all sequences that are open

    def new_scope(self) -> int:
        return 0  # nothing outlives its sequence

    def open(self, sequence: DraftSequence, scope: int) -> None:
        needed = sequence.num_committed
        if needed > self._max_tokens:
            raise CannotSpeculate(f"{needed} tokens, an index holds {self._max_tokens}")
        if self._held + needed > self._max_tokens:
            raise NoRoom(f"the indices hold {self._held} of {self._max_tokens} tokens")
        sequence.state = _State(held=needed)
        self._held += needed

    def memory_share(self, sequence: DraftSequence) -> float:
        return sequence.num_committed / self._max_tokens

    def on_round_changed(self, sequence: DraftSequence) -> None:
        state: _State = sequence.state
        more = sequence.num_committed - state.held
        if self._held + more > self._max_tokens:
            raise NoRoom(f"the indices hold {self._held} of {self._max_tokens} tokens")
        self._held += more
        state.held += more

    def rows(self, sequence: DraftSequence, limit: int) -> int:
        if sequence.complete:
            return 0
        return max(1, min(limit, _left(sequence)))

    def step(
        self, sequences: Sequence[DraftSequence], limit: int, plans: Sequence[RoundPlan]
    ) -> int:
        rows = sum(self.rows(sequence, limit) for sequence in sequences)
        for sequence, plan in zip(sequences, plans, strict=True):
            _index(sequence, limit)
            if _left(sequence):
                continue
            if sequence.phase is DraftRoundPhase.VERIFYING:
                self._prepare_outcomes(sequence, plan)
            else:
                self._continue(sequence, plan)
            sequence.complete = True
        return rows

    def rank(self, sequence: DraftSequence, accepted: int, token: int) -> tuple[int | None, int]:
        return None, 0

    def draft_distributions(self, sequence: DraftSequence, count: int) -> MakeRows | None:
        return None  # nothing is drawn here

    def close(self, sequence: DraftSequence) -> None:
        if sequence.state is not None:
            self._held -= sequence.state.held
        sequence.state = None

    def check_integrity(self, num_sequences: int) -> None:
        if self._held < 0 or (self._held and not num_sequences):
            raise RuntimeError("draft integrity: tokens of no sequence are held")

    def _prepare_outcomes(self, sequence: DraftSequence, plan: RoundPlan) -> None:
        index: NgramIndex = sequence.state.index
        for accepted, width in enumerate(plan.fan_out):
            chain = sequence.speculation[:accepted]
            wrong = sequence.speculation[accepted : accepted + 1]
            guesses = index.candidates(width + 1, chain) if width else []
            for token in [guess for guess in guesses if guess not in wrong][:width]:
                tokens = index.propose(plan.depth, (*chain, token))
                sequence.branches[accepted, token] = PreparedBranch(accepted, token, tokens)

    def _continue(self, sequence: DraftSequence, plan: RoundPlan) -> None:
        for branch in sequence.branches.values():
            if not branch.tokens:
                branch.tokens += sequence.state.index.propose(plan.depth)


@dataclass
class _State:
    held: int  # tokens that are accounted for
    index: NgramIndex = field(default_factory=NgramIndex)


def _left(sequence: DraftSequence) -> int:
    """Tokens that are not indexed yet."""
    state: _State = sequence.state
    return sequence.num_committed - len(state.index)


def _index(sequence: DraftSequence, limit: int) -> None:
    index: NgramIndex = sequence.state.index
    begin, prompt = len(index), len(sequence.prompt)
    end = min(sequence.num_committed, begin + limit)
    index.extend(sequence.prompt[begin:end])
    index.extend(sequence.output[max(0, begin - prompt) : max(0, end - prompt)])


def make_speculator(options: DraftEngineOptions, runner: object) -> NgramSpeculator:
    return NgramSpeculator()
