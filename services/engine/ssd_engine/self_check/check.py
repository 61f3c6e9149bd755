"""Checks everything that a loaded model will be asked for, once, before it serves."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk, Draw, Drawing, Part, TreeRows
from ssd_engine.kernels.cpu.panels import MOST_ROWS, PackedWeight
from ssd_engine.models.tensor_parallel import TensorParallel
from ssd_engine.sampling.guesses import guess_scores
from ssd_engine.sampling.history import History
from ssd_engine.sampling.noise import STREAM_DRAFT
from ssd_engine.sampling.params import MAX_TOP_LOGPROBS, SamplingParams
from ssd_engine.sampling.rejection import LIKELIEST, draft_distribution, draw_from, sigma_of
from ssd_engine.sampling.sampler import SampleRow, adjust_logits, logprobs, perturbed_scores
from ssd_engine.self_check.expected import TOLERANCE
from ssd_engine.self_check.features import FeatureCheck
from ssd_engine.self_check.findings import CheckedOperation, Findings
from ssd_engine.self_check.layers import LayerCheck
from ssd_engine.self_check.workload import (
    CheckRoom,
    clear_context,
    fill_context,
    prefill_parts,
    round_parts,
    tree_parts,
)

if TYPE_CHECKING:
    from ssd_engine.execution.graphs import GraphRunner
    from ssd_engine.execution.step import Step
    from ssd_engine.forward.step_inputs import StepRun

log = logging.getLogger(__name__)

PREFILL, FORWARD, STEP, TREE = "prefill", "forward", "step", "tree step"
SHORT_PREFILL = 17  # rows
CAPTURED, DRAWN, MOVE = "captured graph", "drawing of tokens", "move of keys and values"
REPORTED, SIGMA = "log probabilities", "drawing for rejection"
USE_TORCH = "--kernels torch computes it by torch's own operations"
EAGER = "--eager launches it kernel by kernel"
DRAWN_ROWS = 16  # whose tokens are drawn again
NEARLY_EQUAL = 1e-5  # relative difference of two scores that count as equal
SIGMA_ROUNDING, SIGMA_LEAST = 2.0**-7, 1e-6  # allowed error of a weight: relative, and absolute
WIDTH, DOWN_WEIGHT = 3, 0.5
NO_REMEDY = "torch itself computes something else here: check the device and its libraries"


def load_checked(config: ModelConfig, options: RunnerOptions, tp: TensorParallel) -> ModelRunner:
    """A model that serves: it is checked where the options say so."""
    runner = ModelRunner(config, options, tp)
    if options.self_check:
        check_model(runner)
    return runner


@torch.inference_mode()
def check_model(runner: ModelRunner) -> Findings:
    """Raises SelfCheckError, on every rank, when an operation of any rank is off by more than
    rounding. Leaves the model as it was."""
    begin = time.monotonic()
    findings = Findings(runner.model.weights.norm.dtype, runner.options.directory.name)
    room = CheckRoom(runner.options, runner.num_blocks, runner.config.vocab_size)
    has_own = runner.steps is not None or isinstance(runner.model.weights.head, PackedWeight)
    remedy = USE_TORCH if has_own else NO_REMEDY
    for use, parts in _forwards(runner, room):
        fill_context(runner.kv, parts)
        _check_prefill(runner, parts, findings, use, remedy)
        clear_context(runner.kv, parts)
    if runner.steps is not None:
        for step in runner.steps.steps:
            for parts in _step_parts(room, step):
                StepCheck(runner, step, parts, findings).run(runner.steps)
        if runner.options.exact:
            _check_features(runner, room, findings)
    findings.raise_if_wrong(runner.tp)
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()  # others may want the memory that it took
    log.info(
        "self-check passed in %.1f s: the worst of %d operations is off by %.1f roundings",
        time.monotonic() - begin,
        len(findings.errors()),
        max((error for _, error in findings.errors()), default=0.0),
    )
    return findings


def _check_prefill(
    runner: ModelRunner, parts: Sequence[Part], findings: Findings, use: str, remedy: str
) -> None:
    """A prefill of a GPU, and on a CPU every forward."""
    layers = runner.prompt_layers([part for part in parts if isinstance(part, Chunk | TreeRows)])

    def score(rows: Tensor) -> Tensor:
        return runner.multiply_head(runner.model.normalise(layers.hidden)[rows])

    LayerCheck(runner, layers, score, parts, findings, use, remedy).run()


def _check_features(runner: ModelRunner, room: CheckRoom, findings: Findings) -> None:
    """Those of a target's smallest step: heads may ask for them while it serves."""
    from ssd_engine.execution.graphs import GraphRunner

    if runner.steps is None:
        return
    step = runner.steps.steps[0]
    for parts in _step_parts(room, step):
        graphs = GraphRunner([step], runner.steps.eager)
        FeatureCheck(runner, step, parts, findings).run(graphs, STEP, EAGER)


def _forwards(runner: ModelRunner, room: CheckRoom) -> list[tuple[str, list[Part]]]:
    """A prefill; and where steps have no kernels of their own, what they consist of."""
    options = runner.options
    found = [
        (PREFILL, prefill_parts(room, length))
        for length in (options.max_forward_tokens, SHORT_PREFILL)
    ]
    if runner.steps is not None:
        return found
    most = min(options.max_forward_tokens, max(MOST_ROWS, options.step_rows) + 1)
    found += [(FORWARD, round_parts(room, 1, rows, rows)) for rows in range(1, most + 1)]
    if options.branches:
        room_for = options.max_forward_tokens
        found.append((TREE, tree_parts(room, 4, options.branches, room_for, options.step_rows)))
        found.append((TREE, tree_parts(room, 2, options.branches, room_for, 0)))
    return [(use, parts) for use, parts in found if parts]


def _step_parts(room: CheckRoom, step: "Step") -> list[list[Part]]:
    """Everything that a step of this shape may be asked for."""
    shape, options = step.shape, room.options
    found = []
    if shape.rows_per_run < options.branches or options.branches <= options.step_rows:
        rows_per_run = min(shape.rows_per_run, options.step_rows)
        found.append(round_parts(room, shape.runs, rows_per_run, shape.rows))
    if options.branches and shape.rows_per_run >= options.branches:
        found.append(tree_parts(room, shape.runs, options.branches, shape.rows, 0))
        if shape.runs > 1:
            left = shape.rows // (shape.runs // 2) - options.branches
            chain = min(options.step_rows, left, shape.rows_per_run)
            found.append(tree_parts(room, shape.runs, options.branches, shape.rows, max(1, chain)))
    return [parts for parts in found if parts]


class StepCheck:
    """A step of few rows: its operations one by one, what is drawn from their logits, and then the
    graph of all of them, whose bits must be the same."""

    def __init__(
        self, runner: ModelRunner, step: "Step", parts: Sequence[Part], findings: Findings
    ) -> None:
        from ssd_engine.execution.graphs import step_runs

        self._runner, self._step, self._parts, self._findings = runner, step, parts, findings
        self._use = TREE if any(isinstance(part, TreeRows) for part in parts) else STEP
        self._num_rows = sum(len(part.tokens) for part in parts)
        self._samples: dict[Drawing, list[SampleRow]] = {}
        self._draws: dict[Drawing, list[Draw | None]] = {}
        self._runs: dict[Drawing, list[StepRun]] = {}
        count = min(_MOST_HISTORIES, runner.options.max_num_seqs)
        self._histories = [_history(i, runner.config.vocab_size) for i in range(count)]
        for drawing in step.drawings:
            self._samples[drawing], self._draws[drawing] = self._rows_of(drawing)
            self._runs[drawing], self._moves = step_runs(
                parts, self._draws[drawing], runner.options.block_size
            )

    def _rows_of(self, drawing: Drawing) -> tuple[list[SampleRow], list[Draw | None]]:
        samples: list[SampleRow] = []
        draws: list[Draw | None] = []
        likeliest = MAX_TOP_LOGPROBS if drawing >= Drawing.REPORTED else -1
        for number, part in enumerate(self._parts):
            history = None
            if drawing >= Drawing.ADJUSTED:
                history = self._histories[number % len(self._histories)]
            is_tree = isinstance(part, TreeRows)
            path = history.prompt[: self._step.shape.path] if history and is_tree else []
            for i in range(part.num_logits):
                recent = 1 if is_tree else i
                later = [*path, *part.tokens[i + 1 - recent : i + 1]]
                filtered = drawing >= Drawing.FILTERED or self._step.ranks > 1
                samples.append(_sample_row(len(samples), filtered, history, later))
                params, position = samples[-1].params, samples[-1].position
                draw = Draw.of(params, position, history, recent, path, likeliest)
                if self._step.ranks > 1 and len(draws) % 3 == 2:
                    draw = draw._replace(width=WIDTH, down_weight=DOWN_WEIGHT)
                draws.append(draw)
        return samples, draws

    def run(self, graphs: "GraphRunner") -> None:
        runner, step, parts = self._runner, self._step, self._parts
        fill_context(runner.kv, parts)
        self._fill_inputs(0, step.drawings[0])
        step.inputs.copy()
        if self._moves:
            self._check_moves()
        layers, findings, rows = step.layers, self._findings, step.shape.rows

        def score(rows: Tensor) -> Tensor:
            layers.score()
            return layers.logits[rows]

        LayerCheck(runner, layers, score, parts, findings, self._use, USE_TORCH, rows).run()
        for drawing in step.drawings:
            self._fill_inputs(0, drawing)
            step.inputs.copy()
            self._check_drawing(drawing)
            self._check_graphs(graphs, drawing)
        step.inputs.clear(runner.dummy_slot)
        step.use(0)
        clear_context(runner.kv, parts)

    def _fill_inputs(self, side: int, drawing: Drawing) -> None:
        self._step.use(side)
        self._step.inputs.fill(self._runs[drawing], self._runner.dummy_slot, self._moves)
        if drawing >= Drawing.ADJUSTED and self._runner.tp.rank == 0:
            self._tell_histories(self._draws[drawing])

    def _tell_histories(self, draws: Sequence[Draw | None]) -> None:
        """What a step adds to them is added anew: their last tokens are taken back before."""
        rows, outputs = range(self._num_rows), [history.output for history in self._histories]
        last = [output.pop() for output in outputs]
        self._step.tell_histories(rows, draws)
        for output, token in zip(outputs, last, strict=True):
            output.append(token)
        self._step.tell_histories(rows, draws)

    def _place(self, operation: str, remedy: str = USE_TORCH) -> CheckedOperation:
        return CheckedOperation(self._use, self._num_rows, None, operation, remedy)

    def _check_moves(self) -> None:
        self._step.move()
        sources, targets = torch.tensor(self._moves, device=self._runner.device).unbind(1)
        for cache in self._runner.kv.layers:
            for kept in (cache.key, cache.value):
                slots = kept.flatten(0, 1)
                self._findings.compare_bits(self._place(MOVE), slots[targets], slots[sources])

    def _check_drawing(self, drawing: Drawing) -> None:
        step = self._step
        logits = self._runner.tp.gather_columns(step.layers.logits)
        if logits is None:  # Only the first rank draws. Lists of findings are alike on all ranks.
            for operation in self._drawn_operations(drawing):
                self._findings.note(
                    self._place(operation), torch.zeros((), device=self._runner.device)
                )
            return
        step.draw(logits, drawing)
        rows = min(self._num_rows, DRAWN_ROWS)
        logits = logits[:rows, : step.head_rows]
        scores = self._scores(logits, drawing)
        best = scores.topk(step.ranks).values
        # From logits that are no numbers anything may be drawn.
        drawn = scores.gather(1, self._drawn_tokens(rows).clamp(0, step.head_rows - 1))
        # Either of two scores that are as good as equal may come first.
        error = (drawn - best).abs() / (NEARLY_EQUAL * (1 + best.abs()))
        error = torch.where(best == -torch.inf, 0.0, error)  # fewer can be drawn than are ranked
        self._findings.note(self._place(DRAWN), error.max() * TOLERANCE)
        if drawing >= Drawing.REPORTED:
            self._check_reports(logits)
        if step.ranks > 1:
            self._check_sigma(logits, drawing)

    def _drawn_operations(self, drawing: Drawing) -> list[str]:
        if self._step.ranks > 1:
            return [DRAWN, SIGMA]
        return [DRAWN, REPORTED] if drawing >= Drawing.REPORTED else [DRAWN]

    def _scores(self, logits: Tensor, drawing: Drawing) -> Tensor:
        samples = self._samples[drawing][: len(logits)]
        if self._step.ranks == 1:
            return perturbed_scores(logits, samples).double()
        draws = self._draws[drawing][: len(logits)]
        return guess_scores(logits, samples, [draw is None or draw.width < 0 for draw in draws])

    def _check_sigma(self, logits: Tensor, drawing: Drawing) -> None:
        """Hold the weights of rows for rejection, and the tokens that follow, against the CPU's."""
        samples, draws = self._samples[drawing], self._draws[drawing]
        chosen = [i for i in range(len(logits)) if (d := draws[i]) is not None and d.width >= 0]
        rows = [samples[i] for i in chosen]
        expected = draft_distribution(logits[chosen], rows, WIDTH, DOWN_WEIGHT).double()
        lines = self._step.drawn.view(self._step.shape.rows, -1)[chosen]
        following = lines[:, self._step.ranks]
        wire = self._step.sigma_of(lines.cpu().numpy()).wire()
        error = (wire.double() - expected).abs() / (SIGMA_ROUNDING * expected + SIGMA_LEAST)
        # Any token that is as good as the last of the likeliest may be among these.
        adjusted = adjust_logits(logits[chosen], rows)
        last = adjusted.topk(min(LIKELIEST, adjusted.shape[1])).values[:, -1:]
        error = torch.where((adjusted - last).abs() <= NEARLY_EQUAL * (1 + last.abs()), 0.0, error)
        about = [(row.params.seed, row.position) for row in rows]
        told = torch.tensor(about, dtype=torch.int64, device=logits.device).view(-1, 2)
        seeds, positions = told.unbind(1)
        drawn = draw_from(sigma_of(wire), seeds, positions, STREAM_DRAFT)
        wrong = torch.where(drawn == following, 0.0, torch.inf)
        worst = torch.cat((error.flatten(), wrong)).max() if chosen else error.new_zeros(())
        self._findings.note(self._place(SIGMA), worst * TOLERANCE / 2)

    def _check_reports(self, logits: Tensor) -> None:
        step, rows, most = self._step, len(logits), MAX_TOP_LOGPROBS
        tokens = self._drawn_tokens(rows)[:, 0].clamp(0, step.head_rows - 1).tolist()
        told = logprobs(logits, tokens, [most] * rows)
        expected = torch.tensor([[each.chosen, *(value for _, value in each.top)] for each in told])
        values = step.reported[:rows].view(torch.float32).cpu()
        reported = torch.cat((values[:, :1], values[:, 1 + most :]), dim=1)
        error = (reported - expected).abs() / (NEARLY_EQUAL * (1 + expected.abs()))
        self._findings.note(self._place(REPORTED), (error.max() * TOLERANCE).to(logits.device))

    def _drawn_tokens(self, rows: int) -> Tensor:
        """The tokens of the first rows [rows, ranks]."""
        step, drawn = self._step, self._step.drawn.long()
        if step.ranks > 1:
            return drawn.view(step.shape.rows, -1)[:rows, : step.ranks]
        table = drawn.view(step.shape.runs, -1)  # how many are right, then the tokens
        lengths = [len(run.tokens) for run in self._runs[step.drawings[0]]]
        return torch.cat([table[i, 1 : 1 + n] for i, n in enumerate(lengths)])[:rows, None]

    def _check_graphs(self, graphs: "GraphRunner", drawing: Drawing) -> None:
        step, place, tp = self._step, self._place(CAPTURED, EAGER), self._runner.tp
        logits, results = step.layers.logits.clone(), self._results(drawing)
        for side in range(step.num_sides):
            for turn in range(graphs.num_replays(step, side)):
                self._fill_inputs(side, drawing)
                step.layers.logits.zero_()
                step.drawn.zero_()
                if drawing >= Drawing.REPORTED:
                    step.reported.zero_()
                graphs.replay(step, side, turn, drawing)
                rows = self._num_rows
                self._findings.compare_bits(place, step.layers.logits[:rows], logits[:rows])
                if tp.rank == 0:
                    self._findings.compare_bits(place, self._results(drawing), results)
                else:
                    self._findings.note(place, torch.zeros((), device=self._runner.device))
                if self._runner.device.type == "cuda":
                    torch.cuda.synchronize()  # the host's block is filled anew

    def _results(self, drawing: Drawing) -> Tensor:
        """What was drawn, and reported, for rows that do not pad."""
        step, rows, runs = self._step, self._num_rows, len(self._runs[drawing])
        if step.ranks > 1:
            return step.drawn.view(step.shape.rows, -1)[:rows].clone()
        used = step.drawn.view(step.shape.runs, -1)[:runs].flatten()
        if drawing < Drawing.REPORTED:
            return used.clone()
        return torch.cat((used, step.reported[:rows].flatten()))


_FILTERS: list[dict[str, Any]] = [{"top_k": 40, "top_p": 0.9}, {"top_p": 0.8}, {"min_p": 0.02}]
_MOST_HISTORIES = 4  # parts take turns


def _sample_row(i: int, filtered: bool, history: History | None, later: Sequence[int]) -> SampleRow:
    """Greedy and not, in turns. ``later``: tokens after the history."""
    filters = _FILTERS[i // 2 % len(_FILTERS)] if filtered else {}
    how: dict[str, Any] = dict(seed=7919 * i + 1, temperature=(0.0, 1.0)[i % 2], **filters)
    if history is None:
        return SampleRow(SamplingParams(**how), (), range(i))
    return SampleRow(replace(history.params, **how), history.prompt, [*history.output, *later])


def _history(number: int, vocab_size: int) -> History:
    """What was said is likelier. Last comes a token that is the likeliest because of it; biases
    decide against two others, and one is banned."""
    last, other, often, prompted = ((number + 7 * i) % vocab_size for i in range(4))
    params = SamplingParams(
        seed=0,
        repetition_penalty=(1.02, 0.98)[number % 2],
        presence_penalty=0.5,
        frequency_penalty=-40.0,
        logit_bias=((other, 20.0), (often, -100.0)),
        banned=(prompted,),
        banned_until=1 << 30,
    )
    return History(params, [other, prompted], [often, often, often, last, other, last])
