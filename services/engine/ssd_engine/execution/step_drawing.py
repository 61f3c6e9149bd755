"""What is drawn from the logits of a step's rows, over buffers that stay where they are."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.forward.batch import Draw, Drawing, drawing_of
from ssd_engine.forward.result import ForwardResult
from ssd_engine.forward.step_inputs import HistoryInputs, StepInputs, StepRun, StepShape
from ssd_engine.grammar.masks import HeldRow, write_masks
from ssd_engine.kernels.elementwise import overlapping
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.kernels.sampling.drawing import (
    best_of_piece_kernel,
    verdict_kernel,
)
from ssd_engine.kernels.sampling.filtering import CUT, PIECE, Filters
from ssd_engine.kernels.sampling.guessing import Guesses
from ssd_engine.kernels.sampling.rejecting import StepScores
from ssd_engine.kernels.sampling.reporting import Reports
from ssd_engine.sampling.rejection import FewWeights
from ssd_engine.sampling.reported import ReportedLogprobs


class StepDrawing:
    """Draws from a step's logits. With ``ranks`` 1: one token for each row, and how much of what
    the rows verify is right.

    With more: a draft's guesses, the best ``ranks`` tokens of every row, and what follows it.
    """

    def __init__(
        self,
        shape: StepShape,
        vocab: int,
        device: torch.device,
        ranks: int,
        overlap: bool,
        last: Tensor | None = None,
        num_sides: int = 1,
        histories: Histories | None = None,
    ) -> None:
        self.num_sides, self.shape, self.ranks = num_sides, shape, ranks
        self.inputs = StepInputs(shape, device, num_sides)
        self._histories, self._overlap = histories, overlap
        self._history_inputs = HistoryInputs(shape, device, num_sides)
        self._masks: list[Tensor] = []
        if histories is not None:
            self._masks = histories.masks[:num_sides] if num_sides > 1 else histories.masks[-1:]
        # What it may be asked to do; the same on every rank. A draft's guesses need no more for
        # filters than without.
        self.drawings = list(Drawing) if ranks == 1 else [Drawing.PLAIN, Drawing.ADJUSTED]
        self.head_rows, rows = vocab, shape.rows
        self.run_width = triton.next_power_of_2(shape.rows_per_run)
        self._side = 0
        if ranks == 1:
            self._pieces = -(-vocab // PIECE)
            self._filters = Filters(rows, vocab, device, overlap)
            self._best = torch.empty(rows, self._pieces, dtype=torch.float64, device=device)
            self._best_token = torch.empty(rows, self._pieces, dtype=torch.int32, device=device)
            self._broken = torch.empty(rows, self._pieces, dtype=torch.int32, device=device)
            self._reports = Reports(rows, vocab, device, overlap)
            self._host_reported = _host_sides(self._reports.reported, num_sides)
            width = shape.runs * (1 + 2 * self.run_width)
        else:
            self._guesses = Guesses(rows, vocab, ranks, device, overlap)
            width = rows * self._guesses.width
        self.drawn = torch.zeros(width, dtype=torch.int32, device=device)
        self._host_drawn = _host_sides(self.drawn, num_sides)
        if last is None:
            last = torch.zeros(rows, dtype=torch.int32, device=device)
        self._best_of_row = last

    @property
    def host_drawn(self) -> Tensor:
        """What the last run on this side has drawn."""
        return self._host_drawn[self._side]

    def drawn_on(self, side: int) -> NDArray[np.int32]:
        return self._host_drawn[side].numpy()

    def reported_on(self, side: int) -> NDArray[np.int32]:
        """[rows, REPORT_WIDTH] of a step that has reported."""
        return self._host_reported[side].numpy()

    @property
    def reported(self) -> Tensor:
        return self._reports.reported

    def least(self, drawing: Drawing) -> Drawing:
        """What it does to do as much as this."""
        return max(each for each in self.drawings if each <= drawing)

    def guesses_on(self, side: int) -> NDArray[np.int32]:
        """[rows, width] of a draft's step: see ``Guesses``."""
        return self.drawn_on(side).reshape(-1, self._guesses.width)

    def sigma_of(self, lines: NDArray[np.int32]) -> FewWeights:
        """That tokens were drawn from, by lines of guesses."""
        tokens, weights = np.split(lines[:, self.ranks + 1 :], 2, axis=1)
        device = self.drawn.device
        return FewWeights(tokens, weights.view(np.float32), self.head_rows, device)

    def use(self, side: int) -> None:
        self._side = side
        self.inputs.use(side)
        self._history_inputs.use(side)

    def tell_histories(self, rows: Sequence[int], draws: Sequence[Draw | None]) -> None:
        """The last that an adjusted step is told, before it is launched. ``rows``: that draw so."""
        if self._histories is None:
            raise RuntimeError("a step without histories has none to be told")
        self._histories.tell(self._history_inputs, rows, draws)

    def held_rows(
        self,
        rows: Sequence[int],
        draws: Sequence[Draw | None],
        before: Callable[[], NDArray[np.int32]] | None = None,
    ) -> list[HeldRow]:
        """Those whose tokens a grammar decides about. ``before`` tells what the step drew that this
        one was given rows of. Without it these rows are left out: nobody reads their tokens."""
        tokens, held = self.inputs.tokens, []
        for row, draw in zip(rows, draws, strict=True):
            if draw is None or draw.history is None or draw.history.grammar is None:
                continue
            recent = tokens[row + 1 - draw.recent : row + 1].tolist()
            if min(recent, default=0) < 0:
                if before is None:
                    continue
                recent = [int(before()[-token - 1]) if token < 0 else token for token in recent]
            tail = [*draw.path, *recent]
            held.append(HeldRow(row, draw.history.grammar, draw.history.output, tail))
        return held

    def write_masks(self, held: Sequence[HeldRow]) -> None:
        """Which tokens may be drawn there. It has time until they are drawn."""
        if held:
            write_masks(self._masks[self._side].numpy().view(np.uint8), held)

    def deepen(
        self, source: int, drawing: Drawing, slots: Sequence[int], widths: Sequence[int]
    ) -> bool:
        """The inputs of this side, one token further than those of the other. See StepInputs."""
        if not self.inputs.deepen(source, slots, widths):
            return False
        if drawing >= Drawing.ADJUSTED:
            self._history_inputs.deepen(source)
        return True

    def draw(self, logits: Tensor, drawing: Drawing = Drawing.PLAIN) -> None:
        """Tokens, or the best of every row, to ``drawn``. The logits stay as they are."""
        adjusted = logits
        if drawing >= Drawing.ADJUSTED and self._histories is not None:
            about = (self.inputs["tokens"], self.inputs["draw_positions"], self._history_inputs)
            adjusted = self._histories.adjust(logits, *about, self._masks[self._side])
        if self.ranks > 1:
            self._guesses.make(adjusted, self.inputs, self.drawn, self._best_of_row)
            return
        filtered = drawing >= Drawing.FILTERED
        if filtered:
            names = ("temperatures", "top_k", "top_p", "log_min_p")
            self._filters.find(adjusted, *(self.inputs[name] for name in names))
        self._draw(adjusted, filtered)
        if drawing >= Drawing.REPORTED:
            wanted = self.inputs["top_logprobs"]
            self._reports.make(logits, wanted, self._best, self._best_token)

    def scores(self, logits: Tensor, drawing: Drawing) -> StepScores:
        """What is left of a step of one rank that has drawn from these logits."""
        adjusted = logits
        if drawing >= Drawing.ADJUSTED and self._histories is not None:
            adjusted = self._histories.adjusted(self.shape.rows)
        return StepScores(
            logits=logits,
            adjusted=adjusted,
            temperatures=self.inputs["temperatures"],
            drawn=self._best_of_row,
            filters=self._filters,
            is_filtered=drawing >= Drawing.FILTERED,
            reports=self._reports,
            is_reported=drawing >= Drawing.REPORTED,
        )

    def fetch(self, drawing: Drawing) -> None:
        """Copies what was drawn to the host, which has it when the device is done."""
        self.host_drawn.copy_(self.drawn, non_blocking=True)
        if drawing >= Drawing.REPORTED:
            self._host_reported[self._side].copy_(self.reported, non_blocking=True)

    def _cuts(self, filtered: bool) -> dict[str, Any]:
        """What the kernels are told of the filters."""
        filters = self._filters
        return dict(
            cuts=filters.cuts,
            ties=filters.ties,
            FILTERED=filtered,
            CUT=CUT,
            CUT_PIECES=filters.padded,
        )

    def _noise(self) -> list[Tensor]:
        return [self.inputs[name] for name in ("seeds", "temperatures", "draw_positions")]

    def _draw(self, logits: Tensor, filtered: bool = False) -> None:
        found = (self._best, self._best_token, self._broken)
        best_of_piece_kernel[(self._pieces, self.shape.rows)](
            logits,
            *self._noise(),
            *found,
            logits.stride(0),
            self.head_rows,
            self._pieces,
            PIECE=PIECE,
            **self._cuts(filtered),
            **overlapping(self._overlap),
        )
        verdict_kernel[(self.shape.runs,)](
            self.inputs["tokens"],
            self.inputs["run_begin"],
            self.inputs["run_rows"],
            *found,
            self.drawn,
            self._best_of_row,
            self.head_rows,
            self._pieces,
            ROWS=self.run_width,
            PIECES=triton.next_power_of_2(self._pieces),
            **overlapping(self._overlap),
        )


class PromptDrawing:
    """Draws the first tokens after prompts, whose logits no step has computed."""

    def __init__(
        self,
        rows: int,
        vocab: int,
        device: torch.device,
        overlap: bool,
        histories: Histories | None = None,
    ) -> None:
        """``rows`` are drawn at a time."""
        shape = StepShape(rows, rows, 1, max_positions=1, block_size=1)
        self._step = StepDrawing(shape, vocab, device, 1, overlap, histories=histories)
        self._step.inputs.clear(0)
        self._logits = torch.zeros(rows, vocab, device=device)

    def warm_up(self) -> None:
        with torch.inference_mode():
            for drawing in self._step.drawings:
                self._step.inputs.copy()
                self._step.draw(self._logits, drawing)

    def draw(self, logits: Tensor, draws: Sequence[Draw | None]) -> ForwardResult:
        """``logits`` [rows, vocab], one for each of ``draws``."""
        tokens: list[int] = []
        broken: list[int] = []
        reports: list[NDArray[np.int32]] = []
        most = self._step.shape.rows
        for begin in range(0, len(draws), most):
            some = draws[begin : begin + most]
            self._draw(logits[begin : begin + most], some)
            flat = self._step.drawn_on(0).reshape(-1, 3)[: len(some)]  # how many are right, first
            tokens += flat[:, 1].tolist()
            broken += flat[:, 2].tolist()
            reports.append(self._step.reported_on(0)[: len(some)].copy())
        reported = ReportedLogprobs(np.concatenate(reports))
        return ForwardResult(lambda: logits, drawn=tokens, broken=broken, reported=reported)

    def _draw(self, logits: Tensor, draws: Sequence[Draw | None]) -> None:
        step, drawing = self._step, drawing_of(draws)
        step.inputs.fill([StepRun([0], [0], [0], [0], [0], draws=[draw]) for draw in draws], 0)
        if drawing >= Drawing.ADJUSTED:
            step.tell_histories(range(len(draws)), draws)
            step.write_masks(step.held_rows(range(len(draws)), draws))
        step.inputs.copy()
        self._logits[: len(draws)] = logits
        step.draw(self._logits, drawing)
        step.fetch(drawing)
        if logits.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _host_sides(tensor: Tensor, sides: int) -> list[Tensor]:
    """Where it is copied to."""
    pinned = tensor.device.type == "cuda"
    return [torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for _ in range(sides)]
