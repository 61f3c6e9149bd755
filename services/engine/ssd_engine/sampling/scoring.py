"""How likely given tokens are, and which are the likeliest: many rows of logits at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_engine.sampling.sampler import MASS_BITS, masses

NO_TOKEN = -1
ID_BITS = 32


def score_tokens(logits: Tensor, tokens: Sequence[int], top_n: int) -> Tensor:
    """Lines [n, 1 + 2 * top_n] int32, as ``ReportedLogprobs`` reads them, from logits [n, vocab]
    before any sampling option: the numbers of ``sampler.logprobs``.

    A row whose logits hold NaN or infinity has NaN for its token. Nothing waits for the device.
    """
    logits = logits.to(torch.float32)
    highest = logits.amax(dim=-1, keepdim=True)
    total = masses(logits, highest).sum(dim=-1, keepdim=True).to(torch.float64) / 2.0**MASS_BITS
    given = torch.tensor(tokens, device=logits.device)[:, None]
    ids = _likeliest(logits, top_n)
    values = logits.gather(1, torch.cat((given, ids), dim=1)).to(torch.float64)
    values = (values - highest.to(torch.float64) - total.log()).to(torch.float32)
    values[:, :1].masked_fill_(~highest.isfinite(), torch.nan)
    missing = top_n - ids.shape[1]  # in a small vocabulary
    told = torch.nn.functional.pad(ids.to(torch.int32), (0, missing), value=NO_TOKEN)
    bits = torch.nn.functional.pad(values.view(torch.int32), (0, missing))
    return torch.cat((bits[:, :1], told, bits[:, 1:]), dim=1)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The ``count`` likeliest tokens of each row, best first, ties by the lower id.

    Value and id are one integer: no two are equal, so that their order is the same everywhere.
    """
    count = min(count, logits.shape[1])
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # 0 and -0 are the same
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << ID_BITS) | ((1 << ID_BITS) - 1 - ids)
    best = keys.topk(count, dim=-1).values
    return (1 << ID_BITS) - 1 - (best & ((1 << ID_BITS) - 1))
