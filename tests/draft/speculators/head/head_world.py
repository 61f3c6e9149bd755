"""A head's draft core, and a target that plays rounds with it and tells its hidden states."""

import itertools
from pathlib import Path
from typing import Any

from torch import Tensor

from ssd_draft.engine.core import DraftCore
from ssd_draft.planning.plan import Planner
from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_draft.speculators.head.speculator import HeadSpeculator
from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import HeadConfig, fit_to_target, load_head_config
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow, argmax, perturbed_scores
from ssd_engine.speculation.features import FeatureNeeds
from ssd_engine.speculation.frames import Branches, Close, Launch, Open, Outcome, Plane, Source
from ssd_engine.speculation.verification import Verification
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.text.token_ids import pack_tokens
from tests.clockwork import VOCAB
from tests.harness import BLOCK, make_runner

DEPTH, BUDGET, WINDOW = 4, 8, 1024
LINK = 1


class Pair:
    """A target and a head on disk, loaded."""

    def __init__(self, target: Path, head: Path) -> None:
        self.target = make_runner(target, num_blocks=256)
        self.config: HeadConfig = fit_to_target(
            load_head_config(head), self.target.config, "target"
        )
        self.target.watch(self.config.boundaries or ())
        self._head, self._target = head, target

    @property
    def vocab_size(self) -> int:
        return self.target.config.vocab_size

    def make_head(self, num_blocks: int = 256, max_context: int = 512) -> HeadRunner:
        options = RunnerOptions(
            directory=self._head,
            dtype="float32",
            device="cpu",
            block_size=BLOCK,
            max_model_len=max_context,
            max_num_seqs=8,
            max_forward_tokens=1024,
            num_kv_blocks=num_blocks,
        )
        checkpoint = open_head(self._head, self.config, self._target)
        return HeadRunner(self.config, checkpoint, options, self.vocab_size)

    def make_speculator(
        self, num_blocks: int = 256, max_context: int = 512, window: int = WINDOW
    ) -> HeadSpeculator:
        boundaries, hidden_size = self.config.boundaries or (), self.config.target_hidden_size
        return HeadSpeculator(
            self.make_head(num_blocks, max_context),
            FeatureNeeds(boundaries, hidden_size, "float32"),
            BLOCK,
            max_context,
            DEPTH,
            BUDGET,
            self.vocab_size,
            window,
        )

    def read(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Logits after the last token, and the features of all of them."""
        chunk = Chunk(tokens, 0, list(range(-(-len(tokens) // BLOCK))), 1)
        logits = self.target.forward([chunk])
        assert logits is not None
        assert self.target.features is not None
        return logits[0], self.target.features.clone()


class Told:
    """A sequence at the target."""

    def __init__(self, pair: Pair, key: int, prompt: list[int], params: SamplingParams) -> None:
        self.pair, self.key, self.params = pair, key, params
        self.prompt, self.tokens = prompt, list(prompt)
        self.round = 0
        self.speculation: list[int] = []
        self.num_told = 0  # positions
        self.drafted = self.accepted = self.rounds = 0

    def true_token(self, tokens: list[int]) -> int:
        """Plain decoding's."""
        logits, _ = self.pair.read(tokens)
        output = tokens[len(self.prompt) :]
        row = SampleRow(self.params, self.prompt, output)
        return int(argmax(perturbed_scores(logits[None], [row]))[0])

    def verify(self) -> tuple[int, int]:
        """The outcome of the round."""
        for accepted, token in enumerate([*self.speculation, None]):
            true = self.true_token([*self.tokens, *self.speculation[:accepted]])
            if true != token:
                return accepted, true
        raise AssertionError("a token is always drawn")

    def features(self, start: int, end: int) -> Tensor:
        return self.pair.read(self.tokens[:end])[1][start:end]


def chain(first: int, count: int, vocab_size: int = VOCAB) -> list[int]:
    """Tokens as clockwork has them."""
    tokens = [first]
    while len(tokens) < count:
        tokens.append((7 * tokens[-1] + 3) % vocab_size)
    return tokens


class Inbox:
    """A plane that is up: what comes on it is up to a test; most tell the speculator itself."""

    reason = ""
    came_up = True
    state = PlaneState.UP

    def __init__(self) -> None:
        self.rows: list[tuple[RowsKey, Tensor]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, max_bytes: int) -> list[tuple[RowsKey, Tensor]]:
        taken: list[tuple[RowsKey, Tensor]] = []
        while self.rows and max_bytes > 0:
            taken.append(self.rows.pop(0))
            max_bytes -= taken[-1][1].nbytes
        return taken

    def close(self) -> None:
        pass


def opening(
    told: Told, verification: Verification = Verification.COUPLED, max_tokens: int = 400
) -> Open:
    """Of a sequence as it stands."""
    output = pack_tokens(told.tokens[len(told.prompt) :])
    return Open(
        told.key, told.round, pack_tokens(told.prompt), output, told.speculation, max_tokens,
        told.params, verification, 0.5, DEPTH, 0,
    )  # fmt: skip


class HeadWorld:
    """One link. What is told when is up to the test; all else goes as between two services."""

    def __init__(self, pair: Pair, speculator: HeadSpeculator | None = None) -> None:
        self.pair = pair
        self.speculator = speculator or pair.make_speculator()
        stream = told_features(self.needs)
        answer = PlaneAnswer(PlaneKind.TCP, "127.0.0.1:1", b"", stream)
        clock = itertools.count(0.0, 1e-6).__next__
        self.inbox = Inbox()
        self.core = DraftCore(
            self.speculator,
            lambda depth: Planner(DEPTH, BUDGET),
            8,
            None,
            256,
            64,
            clock=clock,
            open_features=lambda up, needs: (self.inbox, Plane(0, 0, answer)),
        )
        self.core.handle(TargetLinkUp(LINK, DEPTH))
        self.told: dict[int, Told] = {}
        self.verify_micros = 0  # not known: branches are pushed as they grow
        self.pushed: dict[tuple[int, int, int, int], list[int]] = {}

    @property
    def needs(self) -> FeatureNeeds:
        assert self.speculator.features is not None
        return self.speculator.features

    def sequence(self, key: int = 1) -> DraftSequence:
        return self.core._links[LINK].sequences[key]

    def open(
        self,
        key: int = 1,
        prompt: list[int] | None = None,
        verification: Verification = Verification.COUPLED,
        max_tokens: int = 400,
        **sampling: Any,
    ) -> Told:
        prompt = prompt or chain(5 + 3 * key, 30, self.pair.vocab_size)
        params = SamplingParams(**{"seed": key, "temperature": 0.0, **sampling})
        told = self.told[key] = Told(self.pair, key, prompt, params)
        self.open_again(told, verification, max_tokens)
        return told

    def open_again(
        self,
        told: Told,
        verification: Verification = Verification.COUPLED,
        max_tokens: int = 400,
    ) -> None:
        """As the sequence stands."""
        self.pushed = {at: tokens for at, tokens in self.pushed.items() if at[0] != told.key}
        self.core.handle(TargetFrames(LINK, [opening(told, verification, max_tokens)]))

    def close(self, key: int) -> None:
        told = self.told.pop(key)
        self.core.handle(TargetFrames(LINK, [Close(key, told.round)]))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for link in self.core.step().links:
                for frame in link.frames:
                    if isinstance(frame, Branches):
                        self._book(frame)
            self.core.check_integrity()

    def settle(self, most: int = 200) -> None:
        """Until there is nothing to do."""
        for _ in range(most):
            self.step()
            if not self.core.has_work:
                return
        raise AssertionError("the draft never comes to rest")

    def _book(self, frame: Branches) -> None:
        for b in frame.branches:
            tokens = self.pushed.setdefault((frame.sequence, frame.round, b.accepted, b.token), [])
            assert b.start == len(tokens)
            tokens += b.tokens

    def tell(self, told: Told, start: int | None = None, end: int | None = None) -> None:
        """The features of the committed tokens but the last one, or of some of them."""
        start = told.num_told if start is None else start
        end = len(told.tokens) - 1 if end is None else end
        if end > start:
            rows = told.features(start, end)
            self.speculator.take_features(self.sequence(told.key), start, rows)
        told.num_told = max(told.num_told, end)
        self.core.check_integrity()

    def end_round(self, told: Told) -> tuple[int, int]:
        """The target verifies."""
        accepted, token = told.verify()
        told.drafted += len(told.speculation)
        told.accepted += accepted
        told.rounds += 1
        self.decide(told, accepted, token)
        return accepted, token

    def decide(self, told: Told, accepted: int, token: int) -> None:
        """The round ends so, whatever the target would say."""
        self.core.handle(TargetFrames(LINK, [Outcome(told.key, told.round, accepted, token)]))
        told.tokens += [*told.speculation[:accepted], token]

    def launch(
        self,
        told: Told,
        outcome: tuple[int, int],
        take: int = DEPTH,
        ngram: list[int] | None = None,
    ) -> None:
        taken = self.pushed.get((told.key, told.round, *outcome), [])[:take]
        source = Source.CACHE if taken else Source.NONE
        if ngram is not None:
            taken, source = ngram, Source.NGRAM
        told.round += 1
        told.speculation = taken
        frame = Launch(told.key, told.round, taken, source, DEPTH, self.verify_micros)
        self.core.handle(TargetFrames(LINK, [frame]))

    def play(self, told: Told, wait: bool = False, tells: bool = True) -> None:
        """A round from its end to the next one's tree. With ``wait`` the target takes what the
        draft makes of the outcome, else the branch that is there."""
        outcome = self.end_round(told)
        if tells:
            self.tell(told)
        if wait:
            self.settle()
        self.launch(told, outcome)
        self.settle()
