"""A head's draft core, and a target that plays rounds with it and tells its hidden states."""

from pathlib import Path
from typing import Any

from torch import Tensor

from ssd_draft.planning.plan import Planner
from ssd_draft.speculators.head.speculator import HeadSpeculator
from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import HeadConfig, fit_to_target, load_head_config
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow, argmax, perturbed_scores
from ssd_engine.speculation.features import FeatureNeeds
from ssd_engine.speculation.frames import Close, Launch, Open, Outcome, Plane, Source
from ssd_engine.speculation.verification import Verification
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from tests.clockwork import VOCAB
from tests.draft.inbox import Inbox
from tests.draft.told_draft import ToldDraft, opened
from tests.harness import BLOCK, make_runner

DEPTH, BUDGET, WINDOW = 4, 8, 1024


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
        self.drafted = self.accepted = 0

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


def opening(told: Told, verification: Verification = Verification.COUPLED) -> Open:
    """Of a sequence as it stands."""
    return opened(
        told.key,
        told.prompt,
        told.tokens[len(told.prompt) :],
        round=told.round,
        speculation=told.speculation,
        max_tokens=400,
        sampling=told.params,
        verification=verification,
        depth=DEPTH,
    )


class HeadWorld(ToldDraft):
    """One link. What is told when is up to the test; all else goes as between two services."""

    def __init__(self, pair: Pair, speculator: HeadSpeculator | None = None) -> None:
        self.pair = pair
        self.speculator = speculator or pair.make_speculator()
        answer = PlaneAnswer(PlaneKind.TCP, "127.0.0.1:1", b"", told_features(self.needs))
        self.inbox = Inbox()
        super().__init__(
            self.speculator,
            lambda depth: Planner(DEPTH, BUDGET),
            open_features=lambda up, needs: (self.inbox, Plane(0, 0, answer)),
        )
        self.told: dict[int, Told] = {}
        self.verify_micros = 0  # not known: branches are pushed as they grow

    @property
    def needs(self) -> FeatureNeeds:
        assert self.speculator.features is not None
        return self.speculator.features

    def open(
        self,
        key: int = 1,
        prompt: list[int] | None = None,
        verification: Verification = Verification.COUPLED,
        **sampling: Any,
    ) -> Told:
        prompt = prompt or chain(5 + 3 * key, 30, self.pair.vocab_size)
        params = SamplingParams(**{"seed": key, "temperature": 0.0, **sampling})
        told = self.told[key] = Told(self.pair, key, prompt, params)
        self.send(opening(told, verification))
        return told

    def close(self, key: int) -> None:
        told = self.told.pop(key)
        self.send(Close(key, told.round))

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
        self.decide(told, accepted, token)
        return accepted, token

    def decide(self, told: Told, accepted: int, token: int) -> None:
        """The round ends so, whatever the target would say."""
        self.send(Outcome(told.key, told.round, accepted, token))
        told.tokens += [*told.speculation[:accepted], token]

    def launch(
        self,
        told: Told,
        outcome: tuple[int, int],
        take: int = DEPTH,
    ) -> None:
        taken = self.pushed.get((told.key, told.round, *outcome), [])[:take]
        source = Source.CACHE if taken else Source.NONE
        told.round += 1
        told.speculation = taken
        frame = Launch(told.key, told.round, taken, source, DEPTH, self.verify_micros)
        self.send(frame)

    def play(self, told: Told, tells: bool = True) -> None:
        """A round from its end to the next one's tree; the branch that is there is taken."""
        outcome = self.end_round(told)
        if tells:
            self.tell(told)
        self.launch(told, outcome)
        self.settle()
