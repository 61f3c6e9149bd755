"""A draft model.

A round that is being verified begins with one forward over the chain, committed tokens that are
new included: it gives the guesses of the token after each length. Then one forward per depth
extends all branches together. A decided round goes straight on from its outcome: a chain of plain
decode steps.

Branches are drafted one depth beyond their use, and their guesses are remembered. So when one of
them is taken the guesses after each of its tokens are known, and the next round begins with its
first depth at once; the KV of the taken tokens is moved to the sequence before that forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_draft.config import DraftEngineOptions
from ssd_draft.planning.plan import RANKS, RoundPlan
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence, PreparedBranch
from ssd_draft.planning.tree import Ranked, Tree
from ssd_draft.speculators.base import CannotSpeculate
from ssd_engine.forward.batch import Chunk, Draw, Part, Rows, TreeRows
from ssd_engine.forward.result import ForwardResult, PendingForward
from ssd_engine.kvcache.block_pool import BlockLease, BlockPool
from ssd_engine.kvcache.cached_path import CachedPath, NoRoom
from ssd_engine.sampling.guesses import drawn_guesses, ranked_guesses, sample_row
from ssd_engine.sampling.rejection import Wire, whole_wire
from ssd_engine.sampling.sampler import SampleRow
from ssd_engine.speculation.frames import Verification
from ssd_engine.tensor_plane.protocol.rows import MakeRows

LOOK_AHEAD = 1  # depths beyond what is of use


class DraftRunner(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def chains(self) -> bool: ...

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> PendingForward: ...

    def deepen(
        self, flight: PendingForward, slots: Sequence[int], widths: Sequence[int]
    ) -> PendingForward | None: ...


@dataclass(slots=True)
class _State:
    path: CachedPath
    scratch: BlockLease
    slots: list[int]  # the scratch's slots
    tree: Tree | None = None
    # Guesses after each length of the chain, best first; what the outcome is held against.
    rankings: list[list[int]] = field(default_factory=list)
    decided: PreparedBranch | None = (
        None  # the branch that the outcome named, as far as it was drafted
    )
    drafted_in: list[int] = field(default_factory=list)  # slots of that branch
    foreseen: list[list[int]] | None = None  # the rankings of a chain that was drafted here
    # Rejection: what the tokens of each depth were drawn from, one row for each branch of the
    # tree, or one for the branch that the outcome named. [branches, vocab], or few weights of it
    wires: list[Wire] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One sequence's rows of logits."""

    sequence: DraftSequence
    part: Part
    plan: RoundPlan
    begin: int  # row of the first

    @property
    def is_chain(self) -> bool:
        return isinstance(self.part, Chunk) and self.sequence.phase is DraftRoundPhase.VERIFYING

    @property
    def coupled(self) -> bool:
        return self.sequence.verification is Verification.COUPLED

    @property
    def depth(self) -> int:
        """Tokens that the branches have already."""
        return len(self.offers[0].tokens)

    @property
    def offers(self) -> list[PreparedBranch]:
        """The branches that the rows extend, in their order."""
        if self.sequence.phase is DraftRoundPhase.DECIDED:
            return [_decided(self.sequence)]
        offers: list[PreparedBranch] = self.sequence.state.tree.offers
        return offers


@dataclass(frozen=True, slots=True)
class _Flight:
    """A forward that was launched."""

    parts: list[Part]
    wanted: list[_Wanted]
    pending: PendingForward
    # What it extends, and from which depth on, if it is ahead.
    extends: list[tuple[Tree | PreparedBranch, int]] = field(default_factory=list)

    def is_next(self, sequences: Sequence[DraftSequence]) -> bool:
        """Whether it was launched ahead for these sequences, and nothing has come between."""
        if len(sequences) != len(self.wanted):
            return False
        return all(
            sequence is w.sequence
            and sequence.state is not None
            and _extended(sequence) is what
            and what.depth == depth
            for sequence, w, (what, depth) in zip(sequences, self.wanted, self.extends, strict=True)
        )


class ModelSpeculator:
    def __init__(
        self,
        runner: DraftRunner,
        block_size: int,
        max_context: int,
        depth: int,
        budget: int,
        vocab_size: int | None = None,
    ) -> None:
        """``vocab_size``: of the tokens, where the model computes more."""
        self._runner = runner
        self._vocab_size = vocab_size
        self._pool = BlockPool(runner.num_blocks, block_size)
        self._block_size = block_size
        self._max_context = max_context
        self._depth = depth
        self._scratch_tokens = (depth + LOOK_AHEAD) * budget
        self._most_ahead = depth + LOOK_AHEAD + 1  # tokens of a chain, or of a taken branch
        self._budget = budget
        self._ahead: _Flight | None = None
        self._is_typical = True

    @property
    def is_typical(self) -> bool:
        """On a GPU, the step after a change of rounds may wait for a forward that was launched
        ahead and is of no use any more; and one that the target waits for has the device to itself.
        """
        return self._is_typical

    @property
    def pool(self) -> BlockPool:
        return self._pool

    def new_scope(self) -> int:
        return self._pool.new_root()

    def open(self, sequence: DraftSequence, scope: int) -> None:
        self._check_context(sequence)
        tokens, most = sequence.prompt + sequence.output, self._max_tokens(sequence)
        spare = self._pool.num_leases // 2  # others want to grow, too; each has two leases
        path = CachedPath(self._pool, tokens, self._most_ahead, most, scope, spare)
        scratch = self._pool.open((), self._scratch_tokens)
        if scratch is None:
            path.release()
            raise NoRoom("no room for the branches")
        scratch.grow(self._scratch_tokens)
        sequence.state = _State(path, scratch, _slots(scratch, self._block_size))

    def memory_share(self, sequence: DraftSequence) -> float:
        pool, state = self._pool, sequence.state
        if state is None:
            needed = min(sequence.num_committed + self._most_ahead, self._max_tokens(sequence))
            blocks = pool.blocks_for(needed)
        else:
            blocks = state.path.num_blocks
        return (blocks + pool.blocks_for(self._scratch_tokens)) / pool.num_blocks

    def _max_tokens(self, sequence: DraftSequence) -> int:
        return min(sequence.max_tokens + self._depth, self._max_context)

    def on_round_changed(self, sequence: DraftSequence) -> None:
        state: _State = sequence.state
        state.path.reserve(sequence.num_committed)
        new = sequence.num_committed - len(state.path.committed)
        state.path.commit(sequence.output[len(sequence.output) - new :] if new else ())
        if sequence.phase is DraftRoundPhase.DECIDED:
            state.rankings, state.decided = [], _decided(sequence)
            self._keep_branch(sequence)
            if sequence.num_committed + len(state.decided.tokens) > state.path.max_tokens:
                sequence.ready = sequence.complete = True  # no room to go on
        else:
            state.foreseen = _foreseen(sequence.speculation, state.decided)
            sequence.foreseen = state.foreseen is not None
            state.wires = []
        state.tree = None
        self._check_context(sequence)

    def _keep_branch(self, sequence: DraftSequence) -> None:
        """Keep what was drafted for the decided branch, and drop the rest."""
        state: _State = sequence.state
        at = None if state.tree is None else state.tree.index(_decided(sequence))
        if state.tree is None or at is None:
            state.wires, state.drafted_in = [], []
            return
        state.wires = [wire[at : at + 1] for wire in state.wires]
        state.drafted_in = state.tree.slots_of(at)
        _decided(sequence).rankings = state.tree.rankings_of(at)

    def drawn_from(self, sequence: DraftSequence, count: int) -> MakeRows | None:
        """What the first tokens of the decided branch were drawn from [count, vocab]."""
        wires = sequence.state.wires[:count]
        if not count or len(wires) < count:
            return None
        host = torch.device("cpu")
        return lambda: whole_wire(wires, host)[:, : self._vocab_size].contiguous()

    def rank(self, sequence: DraftSequence, accepted: int, token: int) -> tuple[int | None, int]:
        """Where the token stood among the guesses after ``accepted``, and how many these were."""
        rankings = sequence.state.rankings
        if accepted >= len(rankings):
            return None, 0
        ranking = rankings[accepted]
        return (ranking.index(token) if token in ranking else None), len(ranking)

    def _check_context(self, sequence: DraftSequence) -> None:
        """Raise Cannot when the sequence, its chain and one token more do not fit."""
        if sequence.num_committed > sequence.max_tokens:
            raise CannotSpeculate("more tokens than the sequence was opened for")
        if sequence.num_committed + len(sequence.speculation) >= self._max_context:
            raise CannotSpeculate(f"beyond the draft's context of {self._max_context} tokens")
        if len(sequence.speculation) > self._depth:
            raise CannotSpeculate(f"a speculation beyond the depth of {self._depth} tokens")

    def rows(self, sequence: DraftSequence, limit: int) -> int:
        if sequence.complete:
            return 0
        state: _State = sequence.state
        if state.tree is not None:
            return len(state.tree.offers)
        logits = 1 + (
            len(sequence.speculation) if sequence.phase is DraftRoundPhase.VERIFYING else 0
        )
        new = sequence.num_committed - state.path.num_known
        rows = max(logits, min(limit, new + logits - 1))
        return rows + self._budget if self._begins_at_once(sequence, limit) else rows

    def _begins_at_once(self, sequence: DraftSequence, limit: int) -> bool:
        state: _State = sequence.state
        new = sequence.num_committed + len(sequence.speculation) - state.path.num_known
        return (
            sequence.phase is DraftRoundPhase.VERIFYING
            and state.foreseen is not None
            and 0 < new <= limit
        )

    def step(
        self, sequences: Sequence[DraftSequence], limit: int, plans: Sequence[RoundPlan]
    ) -> int:
        """Where the device allows it, the next depth is launched before this one is looked at."""
        flight, self._ahead = self._ahead, None
        follows = flight is not None and flight.is_next(sequences)
        preparing = all(sequence.phase is DraftRoundPhase.VERIFYING for sequence in sequences)
        self._is_typical = not self._runner.chains or (follows and preparing)
        if flight is None or not follows:
            flight = self._launch(sequences, limit, plans)
        if flight is None:
            return 0
        if self._runner.chains:
            self._ahead = self._launch_ahead(flight)
        scored = flight.pending.result()
        if flight.wanted:
            self._use(scored, flight.wanted)
        if self._ahead is not None:
            self._note_tokens(self._ahead)
        return sum(len(part.tokens) for part in flight.parts)

    def _launch(
        self, sequences: Sequence[DraftSequence], limit: int, plans: Sequence[RoundPlan]
    ) -> _Flight | None:
        parts: list[Part] = []
        wanted: list[_Wanted] = []
        begin = 0
        for sequence, plan in zip(sequences, plans, strict=True):
            for part in self._parts(sequence, limit, plan):
                parts.append(part)
                if part.num_logits:
                    wanted.append(_Wanted(sequence, part, plan, begin))
                if isinstance(part, Chunk):
                    sequence.state.path.wrote(part)  # it will be, before anybody asks
                begin += part.num_logits
        if not parts:
            return None
        draws = [draw for w in wanted for draw in _draws(w)]
        return _Flight(parts, wanted, self._runner.step(parts, draws))

    def _launch_ahead(self, flight: _Flight) -> _Flight | None:
        """The depth after the one in flight: its tokens are known to the device alone."""
        going = [w for w in flight.wanted if self._goes_on(w)]
        if not going or not all(_can_chain(w) for w in flight.wanted):
            return None
        if len(going) == len(flight.parts) and (deeper := self._deepen(flight)) is not None:
            return deeper
        wanted: list[_Wanted] = []
        begin = 0
        for w in going:
            rows = flight.pending.rows[w.begin : w.begin + w.part.num_logits]
            part = self._part_ahead(w.sequence, [-row - 1 for row in rows])
            wanted.append(_Wanted(w.sequence, part, w.plan, begin))
            begin += part.num_logits
        parts: list[Part] = [w.part for w in wanted]
        draws = [draw for w in wanted for draw in _draws(w, ahead=1)]
        return _Flight(parts, wanted, self._runner.step(parts, draws), _extending(wanted))

    def _part_ahead(self, sequence: DraftSequence, tokens: list[int]) -> Rows:
        """``tokens`` stand for what the forward in flight will give."""
        if sequence.phase is DraftRoundPhase.VERIFYING:
            rows: TreeRows = sequence.state.tree.rows_ahead(tokens)
            return rows
        state, guesses = sequence.state, _decided(sequence).depth + 1
        state.path.grow(guesses)
        return Chunk(tokens, sequence.num_committed + guesses - 1, state.path.blocks, 1)

    def _note_tokens(self, ahead: _Flight) -> None:
        """Tokens are known now whose forward was launched without them: their KV is in the cache
        before anybody asks."""
        for w in ahead.wanted:
            if w.sequence.phase is DraftRoundPhase.DECIDED:
                decided, path = _decided(w.sequence), w.sequence.state.path
                start = w.sequence.num_committed + decided.depth - 1
                path.wrote(Chunk(decided.tokens[-1:], start, path.blocks, 1))

    def _deepen(self, flight: _Flight) -> _Flight | None:
        """Where every row in flight goes on, the device needs to be told very little."""
        if not flight.extends and any(isinstance(w.part, Chunk) for w in flight.wanted):
            return None  # its last token is committed, or was said: only later ones are guesses
        slots = [slot for w in flight.wanted for slot in self._slots_ahead(w.sequence)]
        widths: list[int] = []
        for w in flight.wanted:
            width = -1 if w.coupled else w.plan.width(w.depth + 1)
            widths += [width] * w.part.num_logits
        pending = self._runner.deepen(flight.pending, slots, widths)
        if pending is None:
            return None
        return _Flight(flight.parts, flight.wanted, pending, _extending(flight.wanted))

    def _slots_ahead(self, sequence: DraftSequence) -> list[int]:
        if sequence.phase is DraftRoundPhase.VERIFYING:
            slots: list[int] = sequence.state.tree.slots_ahead()
            return slots
        path, guesses = sequence.state.path, _decided(sequence).depth + 1
        path.grow(guesses)
        return [path.slot(sequence.num_committed + guesses - 1, self._block_size)]

    def _goes_on(self, w: _Wanted) -> bool:
        """Whether what it extends gets another token after the one in flight."""
        sequence, what = w.sequence, _extended(w.sequence)
        if what is None or what.depth + 1 >= w.plan.depth + LOOK_AHEAD:
            return False
        last = sequence.num_committed + what.depth + 1
        if isinstance(what, Tree):
            return what.has_room(ahead=1) and last + what.longest < self._max_context
        return last < int(sequence.state.path.max_tokens)

    def _parts(self, sequence: DraftSequence, limit: int, plan: RoundPlan) -> list[Part]:
        state: _State = sequence.state
        if state.tree is not None:
            return [state.tree.rows()]
        if sequence.phase is DraftRoundPhase.DECIDED:
            moved = self._move(state)
            return [*moved, state.path.next_chunk(_decided(sequence).tokens, 1, limit)]
        chain = sequence.speculation
        if state.foreseen is None or not self._begins_at_once(sequence, limit):
            return [state.path.next_chunk(chain, len(chain) + 1, limit)]
        parts = self._move(state)
        written = state.path.next_chunk(chain, 0, limit)
        if written.tokens:
            parts.append(written)
        self._start_branches(sequence, plan, state.foreseen)
        if state.tree is None:
            self._judge_complete(sequence, plan)
            return parts
        return [*parts, state.tree.rows()]

    def _move(self, state: _State) -> list[Part]:
        """The decided branch, from the tree's slots to the sequence's."""
        branch, slots = state.decided, state.drafted_in
        state.drafted_in = []
        if branch is None or not slots:
            return []
        tokens = [branch.token, *branch.tokens[: len(slots) - 1]]
        moved = state.path.move(tokens, slots)
        return [] if moved is None else [moved]

    def _use(self, scored: ForwardResult, wanted: list[_Wanted]) -> None:
        """Chains need ranked guesses after each of their tokens, all others one token."""
        chains = [w for w in wanted if w.is_chain]
        others = [w for w in wanted if not w.is_chain]
        for coupled in (True, False):
            self._rank([w for w in chains if w.coupled is coupled], scored, coupled)
        self._guess([w for w in others if w.coupled], scored)
        self._draw([w for w in others if not w.coupled], scored)

    def _rank(self, chains: list[_Wanted], scored: ForwardResult, coupled: bool) -> None:
        if not chains:
            return
        guesses = iter(_ranked(scored, chains, coupled))
        for w in chains:
            self._start_branches(w.sequence, w.plan, list(islice(guesses, w.part.num_logits)))
            self._judge_complete(w.sequence, w.plan)

    def _guess(self, others: list[_Wanted], scored: ForwardResult) -> None:
        if not others:
            return
        if scored.following is not None and all(map(_can_chain, others)):
            self._take_drawn(others, scored, scored.following)
            return
        guesses = iter(_ranked(scored, others, coupled=True))
        for w in others:
            rankings = list(islice(guesses, w.part.num_logits))
            self._extend(w, [ranking[0] for ranking in rankings], rankings)

    def _draw(self, others: list[_Wanted], scored: ForwardResult) -> None:
        if not others:
            return
        if scored.following is not None and scored.sigma is not None:
            self._take_drawn(others, scored, scored.following)
            return
        widths = [w.plan.width(w.depth) for w in others for _ in range(w.part.num_logits)]
        weights = [w.sequence.down_weight for w in others for _ in range(w.part.num_logits)]
        tokens, wire = drawn_guesses(
            _select(scored.logits, others), _sample_rows(others), widths, weights
        )
        at = 0
        for w in others:
            end = at + w.part.num_logits
            w.sequence.state.wires.append(wire[at:end])
            self._extend(w, tokens[at:end])
            at = end

    def _take_drawn(
        self,
        others: list[_Wanted],
        scored: ForwardResult,
        following: NDArray[np.int32],
    ) -> None:
        """What the device has drawn, and the guesses that it has ranked on the way."""
        for w in others:
            rows = slice(w.begin, w.begin + w.part.num_logits)
            if not w.coupled and scored.sigma is not None:
                w.sequence.state.wires.append(scored.sigma[rows])
            ranked = None if scored.best is None else scored.best[rows]
            self._extend(w, following[rows].tolist(), ranked)

    def _extend(self, w: _Wanted, tokens: list[int], ranked: Ranked | None = None) -> None:
        if w.sequence.phase is DraftRoundPhase.DECIDED:
            decided = _decided(w.sequence)
            decided.tokens.append(tokens[0])
            if ranked is not None:
                line = np.asarray(ranked[0]).tolist()
                decided.rankings.append([token for token in line if token >= 0])
        else:
            w.sequence.state.tree.extend(tokens, ranked)
        self._judge_complete(w.sequence, w.plan)

    def _start_branches(
        self, sequence: DraftSequence, plan: RoundPlan, guesses: list[list[int]]
    ) -> None:
        """Begin a branch for each likely outcome."""
        state: _State = sequence.state
        chain = sequence.speculation
        state.foreseen = None
        state.rankings = [
            [token for token in ranking if token != wrong]
            for ranking, wrong in zip(guesses, [*chain, None], strict=True)
        ]
        offers = [
            PreparedBranch(accepted, token)
            for accepted, width in enumerate(plan.fan_out)
            for token in state.rankings[accepted][:width]
        ]
        sequence.offers = {(offer.accepted, offer.token): offer for offer in offers}
        if offers:
            state.tree = Tree(offers, sequence.num_committed, state.path.blocks, state.slots)

    def _judge_complete(self, sequence: DraftSequence, plan: RoundPlan) -> None:
        tree: Tree | None = sequence.state.tree
        if tree is not None:
            depth = tree.depth
            last = sequence.num_committed + tree.longest + depth  # position of the next row
            has_room = tree.has_room() and last < self._max_context
        elif sequence.phase is DraftRoundPhase.DECIDED:
            depth = len(_decided(sequence).tokens)
            has_room = sequence.num_committed + depth < sequence.state.path.max_tokens
        else:
            depth, has_room = 0, False
        sequence.ready = depth >= plan.depth or not has_room
        ranks_ahead = sequence.verification is Verification.COUPLED or self._runner.chains
        beyond = LOOK_AHEAD if ranks_ahead and plan.depth else 0
        sequence.complete = depth >= plan.depth + beyond or not has_room

    def close(self, sequence: DraftSequence) -> None:
        sequence.state.path.release()
        sequence.state.scratch.release()
        sequence.state = None

    def check_integrity(self, num_sequences: int) -> None:
        self._pool.check_integrity()
        if self._pool.num_leases != 2 * num_sequences:
            raise RuntimeError("draft integrity: a lease without a sequence")


def _decided(sequence: DraftSequence) -> PreparedBranch:
    if sequence.decided is None:
        raise RuntimeError("the round is not decided")
    return sequence.offers[sequence.decided]


def _foreseen(chain: Sequence[int], drafted: PreparedBranch | None) -> list[list[int]] | None:
    """The guesses after each length of the chain, if it was drafted here and one token further."""
    if drafted is None or drafted.tokens[: len(chain)] != list(chain):
        return None
    rankings = drafted.rankings[: len(chain) + 1]
    return rankings if len(rankings) == len(chain) + 1 else None


def _slots(lease: BlockLease, block_size: int) -> list[int]:
    return [block * block_size + i for block in lease.blocks for i in range(block_size)]


def _extended(sequence: DraftSequence) -> Tree | PreparedBranch | None:
    """What its forwards make longer; None before there is a tree."""
    if sequence.phase is DraftRoundPhase.DECIDED:
        return _decided(sequence)
    tree: Tree | None = sequence.state.tree
    return tree


def _extending(wanted: Sequence[_Wanted]) -> list[tuple[Tree | PreparedBranch, int]]:
    """What a forward extends that is launched while another one is in flight."""
    found = [_extended(w.sequence) for w in wanted]
    return [(what, what.depth + 1) for what in found if what is not None]


def _can_chain(w: _Wanted) -> bool:
    """Whether the tokens after its rows are those that the device chooses."""
    return not w.is_chain and w.plan.ranks <= RANKS + 1


def _draws(w: _Wanted, ahead: int = 0) -> Sequence[Draw]:
    """How the device ranks a sequence's rows."""
    sequence, n = w.sequence, w.sequence.num_committed
    if sequence.phase is DraftRoundPhase.DECIDED:
        tokens = _decided(sequence).tokens
        count = len(tokens) + ahead
        # What is not known here is the row's own token, the last one.
        return [_draw(w, n + count, ahead, tokens, count)]
    if isinstance(w.part, Chunk):
        return [_draw(w, n + i, i) for i in range(w.part.num_logits)]
    depth = w.depth + ahead
    if sequence.history is None:
        first = _draw(w, n + depth + 1, 1, (), depth)
        after = [first.moved(accepted) for accepted in range(len(sequence.speculation) + 1)]
        return [after[o.accepted] for o in w.offers]
    chain, draws = sequence.speculation, []
    for o in w.offers:
        path = [*chain[: o.accepted], o.token, *o.tokens]
        # The row's own token is the last one, or the one after that, which is not known here.
        draws.append(_draw(w, n + len(path) + ahead, 1, path if ahead else path[:-1], depth))
    return draws


def _draw(
    w: _Wanted, position: int, recent: int, path: Sequence[int] = (), place: int | None = None
) -> Draw:
    """``place``: of the token in its speculation; None: it is ranked, and not drawn."""
    params, history = w.sequence.sampling, w.sequence.history
    draw = Draw.of(params, position, history, recent, () if history is None else tuple(path))
    if w.coupled:
        return draw
    # The token is verified at that place: there so many outcomes are prepared for.
    width = 0 if place is None else w.plan.width(place)
    return draw._replace(width=width, down_weight=w.sequence.down_weight)


def _ranked(scored: ForwardResult, group: list[_Wanted], coupled: bool) -> list[list[int]]:
    """The best guesses of every row, best first."""
    count = max(w.plan.ranks for w in group)
    best = scored.best
    if best is None or best.shape[1] < count:
        samples = _sample_rows(group)
        return ranked_guesses(_select(scored.logits, group), samples, count, coupled)
    if len(group) == 1:
        begin = group[0].begin
        found = best[begin : begin + group[0].part.num_logits, :count]
    else:
        rows = [w.begin + i for w in group for i in range(w.part.num_logits)]
        found = best[rows, :count]
    ranked: list[list[int]] = found.tolist()
    if (found[:, -1] < 0).any():  # fewer can be drawn at all
        return [[token for token in ranking if token >= 0] for ranking in ranked]
    return ranked


def _select(logits: Tensor, group: list[_Wanted]) -> Tensor:
    rows = [w.begin + i for w in group for i in range(w.part.num_logits)]
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _sample_rows(group: list[_Wanted]) -> list[SampleRow]:
    return [row for w in group for row in _rows_of(w.sequence, w.part)]


def _rows_of(sequence: DraftSequence, part: Part) -> list[SampleRow]:
    """One for each row of logits: what lies before the token that it draws."""
    prompt, output, params = sequence.prompt, sequence.output, sequence.sampling
    if sequence.phase is DraftRoundPhase.DECIDED:
        return [sample_row(params, prompt, output, _decided(sequence).tokens)]
    chain = sequence.speculation
    if isinstance(part, Chunk):
        return [sample_row(params, prompt, output, chain[:i]) for i in range(part.num_logits)]
    return [
        sample_row(params, prompt, output, (*chain[: o.accepted], o.token, *o.tokens))
        for o in sequence.state.tree.offers
    ]


def make_model_speculator(
    options: DraftEngineOptions, runner: DraftRunner | None
) -> ModelSpeculator:
    if runner is None:
        raise RuntimeError("a model speculator needs a model")
    return ModelSpeculator(
        runner,
        options.block_size,
        options.max_context,
        options.depth,
        options.budget,
        options.vocab_size,
    )
