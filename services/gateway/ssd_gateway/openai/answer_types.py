"""What answers are made of, as far as it does not depend on what was asked."""

from typing import Any, Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]


class ModelEntry(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    has_chat_template: bool
    speculation_modes: list[str]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelEntry]


class TokenizedPrompt(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class DetokenizedTokens(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class TokenUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Metrics(TypedDict):
    time_to_first_token_ms: float | None
    generation_time_ms: float
    tokens_per_second: float | None
    speculative_decoding: NotRequired[dict[str, Any]]
    ssd: NotRequired[dict[str, Any]]


class TokenOrigin(TypedDict):
    text: str
    origin: str


class Told(TypedDict):
    """What choices of both kinds say."""

    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    token_origins: NotRequired[list[TokenOrigin]]


class CalledFunction(TypedDict):
    name: NotRequired[str]  # with what comes first of a call
    arguments: str


class ToolCall(TypedDict):
    index: NotRequired[int]  # in chunks
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class TopToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TopToken):
    top_logprobs: list[TopToken]


class ChatLogprobs(TypedDict):
    content: list[ChosenToken]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatChoice(Told):
    index: int
    message: Message
    logprobs: ChatLogprobs | None


class CompletionChoice(Told):
    index: int
    text: str
    logprobs: CompletionLogprobs | None


class AnyAnswer(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: TokenUsage
    metrics: Metrics


class ChatAnswer(AnyAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(AnyAnswer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
