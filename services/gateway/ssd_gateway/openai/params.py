"""What the targets' contract calls the fields of requests, and what their callers call them.

A name stands for everything below it, too: ``chat.messages_json[2].role`` is ``messages[2].role``.
A name that ends in a bracket is that of each in a list which the caller does not have.
"""

from typing import Any

from ssd_gateway.openai.fields import ChatRequest, CompletionRequest, GenerationFields

Params = dict[str, str]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_GENERATION: Params = {
    **{f"sampling.{name}": name for name in _SAMPLING},
    "stop.max_tokens": "max_tokens",
    "stop.min_tokens": "min_tokens",
    "stop.strings": "stop",
    "stop.token_ids": "stop_token_ids",
    "stop.ignore_eos": "ignore_eos",
}
_CHAT: Params = {
    "request": "messages",  # by far the largest part of one
    "chat": "messages",
    "chat.messages_json": "messages",
    "chat.tools_json": "tools",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat.continue_final_message": "continue_final_message",
}
_TEXT: Params = {"request": "prompt", "text": "prompt", "token_ids": "prompt"}


def chat_params(fields: ChatRequest) -> Params:
    params = {**_generation_params(fields), **_CHAT, "logprobs.top_n": "top_logprobs"}
    if fields.max_completion_tokens is not None:
        params["stop.max_tokens"] = "max_completion_tokens"
    if not fields.chat_template_kwargs and fields.reasoning_effort is not None:
        params["chat.template_kwargs"] = "reasoning_effort"
    return params


def completion_params(fields: CompletionRequest) -> Params:
    params = {**_generation_params(fields), **_TEXT, "logprobs.top_n": "logprobs"}
    if not (isinstance(fields.prompt, list) and isinstance(fields.prompt[0], int)):
        params["token_ids["] = "prompt"  # one of several, and it is not known which
    return params


def tokenize_params(fields: Any) -> Params:
    return dict(_TEXT if fields.messages is None else _CHAT)


def detokenize_params() -> Params:
    return {"request": "tokens", "token_ids": "tokens"}


def _generation_params(fields: GenerationFields) -> Params:
    return {**_GENERATION, "stop.strings[": "stop"} if isinstance(fields.stop, str) else _GENERATION
