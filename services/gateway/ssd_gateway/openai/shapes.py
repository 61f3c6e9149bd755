"""What answers look like: chats and text completions, whole and in chunks."""

from collections.abc import Sequence
from typing import Any

from ssd.v1 import target_pb2 as pb
from ssd_gateway.chat_formats.message import CallDelta, MessageDelta
from ssd_gateway.openai.answer_types import TokenUsage
from ssd_gateway.openai.choice import Choice, ChoiceDelta
from ssd_gateway.openai.logprobs import chat_logprobs, completion_logprobs


class ChatShape:
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def chunk_choice(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        message = delta.message or MessageDelta()
        content: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if message.reasoning:
            content["reasoning_content"] = message.reasoning
        if message.content or delta.first:
            content["content"] = message.content
        if message.calls:
            content["tool_calls"] = [{"index": call.index, **_call(call)} for call in message.calls]
        return {"index": choice.index, "delta": content, **self._about(choice, delta)}

    def whole_choice(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        said = delta.message or MessageDelta()
        silent = said.calls and not said.content
        content = None if silent else said.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [_call(call) for call in said.calls]
        return {"index": choice.index, "message": message, **self._about(choice, delta)}

    def _about(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        wanted = choice.wanted
        told = wanted.logprobs and delta.entries
        logprobs = chat_logprobs(delta.entries, wanted.tokens_as_ids) if told else None
        return {"logprobs": logprobs, **told_of(choice, delta)}


def _call(call: CallDelta) -> dict[str, Any]:
    """A call, or what is new of it."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class CompletionShape:
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def chunk_choice(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        wanted = choice.wanted
        told = wanted.logprobs and delta.entries
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": completion_logprobs(choice, delta.entries, wanted.tokens_as_ids)
            if told
            else None,
            **told_of(choice, delta),
        }

    whole_choice = chunk_choice


Shape = ChatShape | CompletionShape


def told_of(choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
    """What both shapes say: how the choice ended, if it has, and its tokens, where asked for."""
    finish = choice.finish
    about: dict[str, Any] = {"finish_reason": choice.finish_reason}
    if finish is not None:
        about["stop_reason"] = _stop_reason(choice, finish)
    if delta.prompt_token_ids is not None:
        about["prompt_token_ids"] = delta.prompt_token_ids
    if choice.wanted.token_ids:
        about["token_ids"] = delta.token_ids
    if choice.wanted.origins:
        about["token_origins"] = [
            {"text": entry.text, "origin": entry.origin} for entry in delta.entries if entry.origin
        ]
    return about


def _stop_reason(choice: Choice, finish: pb.GenerateFinish) -> str | int | None:
    """Which of the caller's stops has ended it; None: its end of sequence, or its length."""
    match finish.WhichOneof("stopped_by"):
        case "stop_string":
            return finish.stop_string
        case "stop_token_id" if finish.stop_token_id in choice.wanted.stop_token_ids:
            return finish.stop_token_id
    return None


def usage_of(choices: Sequence[Choice], per_prompt: int) -> TokenUsage:
    """Tokens of the answer so far. A prompt counts once, however many choices, ``per_prompt``, it
    has."""
    prompts = [each.started.prompt_tokens if each.started else 0 for each in choices[::per_prompt]]
    prompt_tokens, output = sum(prompts), sum(_output_tokens(each) for each in choices)
    cached = [
        each.finish.usage.cached_prompt_tokens for each in choices[::per_prompt] if each.finish
    ]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output,
        "total_tokens": prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
    }


def _output_tokens(choice: Choice) -> int:
    if choice.wanted.no_output:
        return 0
    return choice.num_tokens if choice.finish is None else choice.finish.usage.completion_tokens
