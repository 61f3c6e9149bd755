"""Log probabilities in the two shapes that OpenAI has for them."""

from collections.abc import Sequence
from typing import Any

from ssd.v1 import target_pb2 as pb
from ssd_gateway.openai.choice import Choice, TokenEntry


def chat_logprobs(entries: Sequence[TokenEntry], as_ids: bool) -> dict[str, Any]:
    content = []
    for entry in entries:
        logprobs = entry.logprobs or pb.TokenLogprobs()
        content.append(
            {
                **_token(entry.token_id, logprobs.token, logprobs.chosen, as_ids),
                "top_logprobs": [
                    _token(top.token_id, top.token, top.logprob, as_ids) for top in logprobs.top
                ],
            }
        )
    return {"content": content, "refusal": None}


def _token(token_id: int, data: bytes, logprob: float, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(token_id, data, as_ids), "logprob": logprob, "bytes": list(data)}


def completion_logprobs(
    choice: Choice, entries: Sequence[TokenEntry], as_ids: bool
) -> dict[str, Any]:
    """Counts the characters of the choice: offsets are places in its text."""
    tokens, chosen, tops, offsets = [], [], [], []
    for entry in entries:
        logprobs = entry.logprobs
        offsets.append(max(0, choice.num_characters))
        choice.num_characters += len(entry.text)
        data = entry.text.encode() if logprobs is None else logprobs.token
        tokens.append(_name(entry.token_id, data, as_ids))
        chosen.append(None if logprobs is None else logprobs.chosen)
        tops.append(None if logprobs is None else _top(logprobs, entry.token_id, as_ids))
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _top(logprobs: pb.TokenLogprobs, token_id: int, as_ids: bool) -> dict[str, float]:
    """The most likely tokens, and the one that was chosen."""
    found = {_name(top.token_id, top.token, as_ids): top.logprob for top in logprobs.top}
    found.setdefault(_name(token_id, logprobs.token, as_ids), logprobs.chosen)
    return found


def _name(token_id: int, data: bytes, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else data.decode("utf-8", "replace")
