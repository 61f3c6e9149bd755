"""Penalties, logit bias, bans and grammars on the device, where what each sequence has said lies.

A table has one row for each sequence: how often each token stands in its output, and whether it
stands in its prompt. What was committed since the last step is added within a step. Tokens that a
round verifies, or that a draft guesses, are not in the table: a row compares them with its own
tokens one by one, so nothing has to be taken back when they are rejected. Guesses that the host
does not know yet, as their steps are in flight, are in the trail.

The definition is that of ``sampler.adjust_logits``.
"""

from collections import OrderedDict
from collections.abc import KeysView, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.forward.batch import Draw
from ssd_engine.forward.step_inputs import HistoryInputs
from ssd_engine.grammar.masks import mask_bytes
from ssd_engine.kernels.elementwise import overlapping
from ssd_engine.kernels.sampling.filtering import PIECE, wait_for_inputs
from ssd_engine.sampling.history import History
from ssd_engine.sampling.params import (
    MAX_BANNED_TOKENS,
    MAX_LOGIT_BIAS_ENTRIES,
    SamplingParams,
)

SIDES = 2  # of a step, at most
IN_PROMPT = 1
ALIGNMENT = 16  # numbers; a row begins at a multiple of so many
ONCE = tl.constexpr(2)  # in the output
ENTRIES = MAX_LOGIT_BIAS_ENTRIES + MAX_BANNED_TOKENS  # a power of 2
PENALTIES = tl.constexpr(3)  # numbers of a sequence: repetition, presence, frequency


@triton.jit
def add_kernel(
    table,  # [places, vocab] int32
    places,  # [most] of tokens that were committed
    tokens,  # [most]
    count,  # [1]
    vocab,
    given,  # [rows] what each row was given
    chained,  # [rows] how many tokens of the trail come before that
    trail,  # [TRAIL, stride]: of each row, what it was given in the steps that this one follows
    stride,
    rows,
    TRAIL: tl.constexpr,
    MOST: tl.constexpr,  # a power of 2
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    i = tl.arange(0, MOST)
    if TRAIL:
        at = tl.load(chained + i, mask=i < rows, other=TRAIL)
        own = tl.load(given + i, mask=i < rows, other=0)
        tl.store(trail + at * stride + i, own, mask=at < TRAIL)
    there = i < tl.load(count)
    place = tl.load(places + i, mask=there, other=0).to(tl.int64)
    token = tl.load(tokens + i, mask=there, other=0)
    once = tl.full((MOST,), ONCE, tl.int32)
    tl.atomic_add(table + place * vocab + token, once, mask=there & (token < vocab))


@triton.jit
def _seen(
    table,
    place,
    vocab,
    row,
    token,
    mask,
    tokens,
    recent,
    lengths,
    paths,
    chained,
    trail,
    trail_stride,
    PATH: tl.constexpr,
    TRAIL: tl.constexpr,
):
    """Entries of the table, with what stands between them and the row's own place."""
    seen = tl.load(table + place.to(tl.int64) * vocab + token, mask=mask, other=0)
    for i in range(tl.load(recent + row)):
        seen += tl.where(token == tl.load(tokens + row - i), ONCE, 0)
    if PATH:
        for i in range(tl.load(lengths + row)):
            seen += tl.where(token == tl.load(paths + row * PATH + i), ONCE, 0)
    if TRAIL:
        for i in range(tl.load(chained + row)):
            seen += tl.where(token == tl.load(trail + i * trail_stride + row), ONCE, 0)
    return seen


@triton.jit
def _adjusted(x, seen, penalties, place):
    """Nothing here may be fused: products are rounded before they are added to."""
    here = penalties + place * PENALTIES
    repetition = tl.load(here).to(tl.float32)
    again = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(seen > 0, again, x)
    count = seen // ONCE
    cost = tl.load(here + 1) + tl.load(here + 2) * count.to(tl.float64)
    return tl.where(count > 0, x - cost.to(tl.float32), x)


@triton.jit
def penalise_kernel(
    logits,
    out,  # [rows, vocab] float32
    table,
    penalties,  # [places, PENALTIES] float64
    places,  # [rows]; -1: the logits stay as they are
    tokens,  # [rows] what each row was given
    recent,  # [rows] how many of these, up to its own, come after what is in the table
    lengths,  # [rows] of the paths, which come before these
    paths,  # [rows, PATH]
    chained,  # [rows] tokens of the trail that come after the path
    trail,
    trail_stride,
    stride,  # elements between two rows of logits
    out_stride,
    vocab,
    PATH: tl.constexpr,
    TRAIL: tl.constexpr,
    PIECE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    token = piece * PIECE + tl.arange(0, PIECE)
    inside = token < vocab
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=0.0)
    place = tl.load(places + row)
    if place >= 0:
        seen = _seen(
            table,
            place,
            vocab,
            row,
            token,
            inside,
            tokens,
            recent,
            lengths,
            paths,
            chained,
            trail,
            trail_stride,
            PATH,
            TRAIL,
        )
        x = _adjusted(x, seen, penalties, place)
    tl.store(out + row.to(tl.int64) * out_stride + token, x, mask=inside)


@triton.jit
def bias_kernel(
    logits,
    out,
    table,
    penalties,
    places,
    tokens,
    recent,
    lengths,
    paths,
    chained,
    trail,
    trail_stride,
    stride,
    out_stride,
    vocab,
    biased,  # [places, ENTRIES] int32: tokens, -1 where there are no more
    biases,  # [places, ENTRIES] float32
    banned_until,  # [places, ENTRIES] int32: the token is not drawn at positions before this one
    positions,  # [rows] of the token to be drawn
    PATH: tl.constexpr,
    TRAIL: tl.constexpr,
    ENTRIES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adjusts tokens with a bias once more, now with it; those that are banned become -inf."""
    row = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    place = tl.load(places + row)
    if place >= 0:
        entry = place * ENTRIES + tl.arange(0, ENTRIES)
        token = tl.load(biased + entry)
        there = token >= 0
        x = tl.load(logits + row.to(tl.int64) * stride + token, mask=there, other=0.0)
        x += tl.load(biases + entry)
        seen = _seen(
            table,
            place,
            vocab,
            row,
            token,
            there,
            tokens,
            recent,
            lengths,
            paths,
            chained,
            trail,
            trail_stride,
            PATH,
            TRAIL,
        )
        x = _adjusted(x, seen, penalties, place)
        is_banned = tl.load(positions + row) < tl.load(banned_until + entry)
        x = tl.where(is_banned, float("-inf"), x)
        tl.store(out + row.to(tl.int64) * out_stride + token, x, mask=there)


@triton.jit
def hold_kernel(
    out,  # [rows, vocab]
    held,  # [rows]: not 0 where a grammar decides
    masks,  # [rows, words] int32 in the host's memory: a bit for each token that it allows
    out_stride,
    words,
    vocab,
    PIECE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What is not allowed becomes -inf, unless it is no logit at all: that must not be hidden."""
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    if tl.load(held + row) != 0:
        token = piece * PIECE + tl.arange(0, PIECE)
        inside = token < vocab
        word, bit = token // 32, token % 32
        bits = tl.load(masks + row * words + word, mask=word < words, other=0)
        here = out + row.to(tl.int64) * out_stride + token
        x = tl.load(here, mask=inside, other=0.0)
        left_out = ((bits >> bit) & 1) == 0
        is_logit = (x == x) & (x != float("inf"))
        tl.store(here, float("-inf"), mask=inside & left_out & is_logit)


class Histories:
    """The table, and which sequence has which place in it: the last ones that were drawn for.

    All steps share it. A sequence that has lost its place is written anew when it comes again.
    """

    def __init__(
        self,
        places: int,
        rows: int,
        vocab: int,
        device: torch.device,
        overlap: bool = False,
        most_chained: int = 0,
        num_tokens: int | None = None,
    ) -> None:
        """The largest step has ``rows``. There are places for all sequences of one step.
        ``most_chained``: steps, one after the other, that follow one that was said in full.
        ``num_tokens``: that grammars know; None: all."""
        self._vocab, self._device, self._most_chained = vocab, device, most_chained
        self._options = dict(overlapping(overlap), enable_fp_fusion=False)
        self._free = list(range(places))
        self._known: OrderedDict[History, tuple[int, int]] = OrderedDict()  # place, output tokens

        def empty(*sizes: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(sizes, dtype=kind, device=device)

        self._table = empty(places, vocab, kind=torch.int32)
        self._penalties = empty(places, PENALTIES.value, kind=torch.float64)
        self._biased = empty(places, ENTRIES, kind=torch.int32)
        self._biases = empty(places, ENTRIES, kind=torch.float32)
        self._banned_until = empty(places, ENTRIES, kind=torch.int32)
        # Rows begin where several numbers can be read at once, however many tokens there are.
        width = -(-vocab // ALIGNMENT) * ALIGNMENT
        self._adjusted = empty(rows, width, kind=torch.float32)[:, :vocab]
        self._trail = empty(max(1, most_chained), rows, kind=torch.int32)
        words = mask_bytes(num_tokens or vocab) // self._trail.itemsize
        pinned = device.type == "cuda"
        # Which tokens a grammar allows; the device reads it where the host has written it. One for
        # each side of a step, and one for steps that have a single side.
        self.masks = [
            torch.zeros(rows, words, dtype=torch.int32, pin_memory=pinned) for _ in range(SIDES + 1)
        ]

    def tell(
        self, inputs: HistoryInputs, rows: Sequence[int], draws: Sequence[Draw | None]
    ) -> None:
        """Tells of the step that is launched next, whose ``rows`` draw so."""
        told = [
            (row, draw.history, draw)
            for row, draw in zip(rows, draws, strict=True)
            if draw is not None and draw.history is not None
        ]
        histories = dict.fromkeys(history for _, history, _ in told).keys()
        places, added = self._follow(histories, inputs.shape.new_tokens)
        inputs.put([(row, places[history], draw) for row, history, draw in told], added)

    def _follow(
        self, histories: KeysView[History], most: int
    ) -> tuple[dict[History, int], list[tuple[int, int]]]:
        """Places, and tokens that the step has to add there. Where these would be more than
        ``most``, and for a sequence that is new, all is written now."""
        for history in histories & self._known.keys():
            self._known.move_to_end(history)
        places: dict[History, int] = {}
        added: list[tuple[int, int]] = []
        for history in histories:
            place, known = self._known.get(history) or (self._new_place(), -1)
            # Without penalties nobody looks at the tokens.
            length = len(history.output) if history.params.penalised else 0
            if known >= 0 and 0 <= length - known <= most - len(added):
                added += [(place, token) for token in history.output[known:length]]
            else:
                self._write(place, history)
            self._known[history] = (place, length)
            places[history] = place
        return places, added

    def adjust(
        self,
        logits: Tensor,
        tokens: Tensor,
        positions: Tensor,
        inputs: HistoryInputs,
        masks: Tensor,
    ) -> Tensor:
        """Logits of a step whose rows were given these tokens, and draw those at these positions:
        [rows, vocab], until the next. ``masks`` [rows, words]: of rows that are held."""
        rows, vocab = inputs.shape.rows, self._vocab
        out, trail = self.adjusted(rows), (self._trail, self._trail.stride(0))
        inputs.copy()
        add_kernel[(1,)](
            self._table,
            *(inputs[name] for name in ("new_places", "new_tokens", "num_new")),
            vocab,
            *(tokens, inputs["chained"], *trail, rows),
            TRAIL=self._most_chained,
            MOST=triton.next_power_of_2(inputs.shape.new_tokens),
            **overlapping(False),  # what it waits for is no kernel, but the copy
        )
        told = [inputs[name] for name in ("recent", "path_lengths", "paths")]
        shared = (
            *(logits, out, self._table, self._penalties, inputs["places"], tokens, *told),
            *(inputs["chained"], *trail, logits.stride(0), out.stride(0), vocab),
        )
        options = dict(self._options, PATH=inputs.shape.path, TRAIL=self._most_chained)
        penalise_kernel[(-(-vocab // PIECE), rows)](*shared, PIECE=PIECE, **options)
        entries = (self._biased, self._biases, self._banned_until)
        bias_kernel[(rows,)](*shared, *entries, positions, ENTRIES=ENTRIES, **options)
        hold_kernel[(-(-vocab // PIECE), rows)](
            *(out, inputs["held"], masks, out.stride(0), masks.shape[1], vocab),
            PIECE=PIECE,
            **self._options,
        )
        return out

    def adjusted(self, rows: int) -> Tensor:
        """Logits of the last step that has adjusted any: [rows, vocab]."""
        return self._adjusted[:rows]

    def _new_place(self) -> int:
        if self._free:
            return self._free.pop()
        _, (place, _) = self._known.popitem(last=False)
        return place

    def _write(self, place: int, history: History) -> None:
        params = history.params
        penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
        tokens, values, banned_until = zip(*_bias_entries(params, self._vocab), strict=True)
        self._copy(self._table[place], self._entries(history))
        self._copy(self._penalties[place], np.array(penalties))
        self._copy(self._biased[place], np.array(tokens, dtype=np.int32))
        self._copy(self._biases[place], np.array(values, dtype=np.float32))
        self._copy(self._banned_until[place], np.array(banned_until, dtype=np.int32))

    def _entries(self, history: History) -> NDArray[np.int32]:
        vocab = self._vocab
        prompt = np.array(history.prompt, dtype=np.int64)
        output = np.array(history.output, dtype=np.int64)
        entries = ONCE.value * np.bincount(output, minlength=vocab)[:vocab].astype(np.int32)
        entries[prompt[prompt < vocab]] |= IN_PROMPT
        return entries

    def _copy(self, to: Tensor, values: NDArray[np.generic]) -> None:
        source = torch.from_numpy(values)
        if self._device.type == "cuda":
            source = source.pin_memory()
        to.copy_(source, non_blocking=True)


def _bias_entries(params: SamplingParams, vocab: int) -> list[tuple[int, float, int]]:
    """Tokens, each of them once, with their bias and the position until which they are banned."""
    bias, until = dict(params.logit_bias), dict.fromkeys(params.banned, params.banned_until)
    tokens = [token for token in bias | until if token < vocab]
    # What is added where there is no bias leaves every number as it is, -0 included.
    entries = [(token, bias.get(token, -0.0), until.get(token, 0)) for token in tokens]
    return entries + [(-1, 0.0, 0)] * (ENTRIES - len(entries))
