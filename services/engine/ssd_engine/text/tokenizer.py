"""The model's tokenizer, and the bytes of each of its tokens."""

import hashlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ssd_engine.checkpoints.files.model_files import (
    LISTING_BYTES,
    is_there,
    read_bytes,
    reason_of,
)
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.checkpoints.model_store import SHIPPED
from ssd_engine.checkpoints.tokenizer_files import NAMED, SOURCES, TOKENIZER, check_files
from ssd_engine.errors import ConfigError, InputError, ModelError, SSDError
from ssd_engine.text.chats import ASSISTANT_NEXT, ChatOptions, cut_at_end, with_end_marked
from ssd_engine.text.confined.process import (
    ConfinedProcess,
    ConfinedProcessEnded,
    QuestionRefused,
    QuestionsRefused,
)
from ssd_engine.text.confined.renderers import ChatRenderers
from ssd_engine.text.control_tokens import ControlTokens, find_control_tokens
from ssd_engine.text.detokenizer import spelled_out
from ssd_engine.text.plain_tokenizer import is_generic, load_plain

log = logging.getLogger(__name__)

LEAD = "\n"
FORGED = (
    "together with the chat template these texts spell control tokens, which this server does not "
    "allow (--allow-control-tokens)"
)
RENDERERS = ChatRenderers()
PASSED: set[bytes] = set()  # digests of tokenizers that were tried out
TRIAL = "ssd_engine.text.confined.tokenizer_trial"
PROBE = "Once upon a time, “Zoë” said:\n  2+2=4 – naïve? 東京 🙂\t<done>"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template of the operator's own."""

    path: Path
    text: str

    def __str__(self) -> str:
        return f"--chat-template {self.path}"


def read_chat_template(path: Path) -> ChatTemplate:
    try:
        return ChatTemplate(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: {path} cannot be read: {error}") from None


class Backend(Protocol):
    """A library that reads a tokenizer's files: this is all that is asked of it."""

    chat_template: str | None
    tool_template: str | None  # in its place for chats with tools; None: there is one for both
    template_names: Mapping[str, Any]  # names for a chat template: its special tokens
    special_ids: list[int]
    reserved_names: frozenset[str]  # names for a chat template, or its own

    def vocabulary(self) -> dict[str, int]: ...

    def added_tokens(self) -> Mapping[int, Any]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_part(self, text: str) -> list[int]: ...  # one part of a text that may have many

    def decode(self, tokens: Sequence[int]) -> str: ...

    def serialized(self) -> str: ...


# Names that a chat template is given anyway, or that the libraries take as options of theirs.
RESERVED_NAMES = {
    *("messages", "conversation", "chat_template", "tools", "documents", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *NAMED,
}


class Tokenizer:
    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        chat_template: ChatTemplate | None = None,
        allow_control_tokens: bool = False,
    ) -> None:
        """``chat_template``: in place of the model's own. ``allow_control_tokens``: messages of a
        chat may contain them."""
        self._inner = _load(directory, config.architecture)
        if chat_template is not None:
            self._inner.chat_template, self._inner.tool_template = chat_template.text, None
        vocabulary = self._inner.vocabulary()
        beyond = {name: token for name, token in vocabulary.items() if token >= config.vocab_size}
        self._beyond = {token: name for name, token in beyond.items()}
        if beyond:
            log.warning(
                "%s: the tokenizer knows %d tokens that the model has no row for, %s and up: "
                "prompts with them are refused",
                directory,
                len(beyond),
                min(beyond.values()),
            )
        self.token_bytes = token_bytes(self._inner, config.vocab_size)
        self.control_spellings = control_spellings(self._inner, config.vocab_size)
        self.spelled_bytes = spelled_out(self.token_bytes, self.control_spellings)
        self._longest_token = max(len(token.encode()) for token in vocabulary)
        self._check_ids(directory, set(vocabulary.values()))
        self._check_bytes(directory)
        self._template_source = directory if chat_template is None else chat_template
        self._controls = None if allow_control_tokens else self._find_control_tokens()
        self._reads_literally = self._controls is not None and self._is_literal(self._controls)
        self._lead = self._inner.encode_part(LEAD)
        self.fingerprint = self._fingerprint()
        self.text_fingerprint = self._text_fingerprint()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    @property
    def chat_template(self) -> str:
        """Its text; empty where there is none."""
        return self._inner.chat_template or ""

    @property
    def tool_template(self) -> str:
        """That of chats with tools."""
        return self._inner.tool_template or self.chat_template

    def fewest_tokens(self, num_bytes: int) -> int:
        """No text of this size has fewer tokens. The bound is loose: normalising may shrink it."""
        return num_bytes // (4 * self._longest_token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encode("text", lambda: self._inner.encode(text, add_special_tokens))

    def _encode(self, field: str, encode: Callable[[], list[int]]) -> list[int]:
        try:
            return self._known(field, encode())
        except SSDError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise InputError(field, f"the tokenizer failed: {reason_of(error)}") from error

    def _known(self, field: str, tokens: list[int]) -> list[int]:
        """``tokens``, all of which the model has a row for."""
        highest = max(tokens, default=0)
        if highest >= len(self.token_bytes):
            raise InputError(
                field,
                f"contains {self._beyond.get(highest)!r}, token {highest}, which the tokenizer "
                f"knows and the model does not: it has {len(self.token_bytes)} tokens",
            )
        return tokens

    def serialized(self) -> str:
        """What the tokenizers library reads it from."""
        return self._inner.serialized()

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text for people: what is no UTF-8 is replaced."""
        return b"".join(self.token_bytes[token] for token in tokens).decode(errors="replace")

    def spell(self, tokens: Sequence[int]) -> str:
        """The text with control tokens spelled out; what is no UTF-8 is replaced."""
        return b"".join(self.spelled_bytes[token] for token in tokens).decode(errors="replace")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        names: Mapping[str, Any] | None = None,
        options: ChatOptions = ASSISTANT_NEXT,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Messages through the model's chat template, ready for the assistant's turn unless
        ``options`` say otherwise. ``names``: further ones that the template may know."""
        if not self.has_chat_template:
            raise InputError("chat", "the model has no chat template; send text instead")
        reserved = RESERVED_NAMES | self._inner.reserved_names
        for name in names or ():
            if name in reserved or not name.isidentifier() or name.startswith("_"):
                raise InputError("chat.template_kwargs", f"{name!r} is no name that can be given")
        chat = {
            "messages": [dict(message) for message in messages],
            "names": {**(names or {}), **({"tools": list(tools)} if tools else {})},
            "options": options,
        }
        return self._encode(options.field, lambda: self._chat_tokens(chat))

    def _chat_tokens(self, chat: dict[str, Any]) -> list[int]:
        if self._controls is None:
            return self._inner.encode(self._render(chat), add_special_tokens=False)
        return self._encode_guarded(chat, self._controls)

    def _encode_guarded(self, chat: dict[str, Any], controls: ControlTokens) -> list[int]:
        """All control tokens are the template's."""
        try:
            parts = controls.parts(self._render(controls.marked(chat)))
        except InputError as error:  # it may quote the messages
            raise InputError(error.field, controls.restored(error.problem)) from None
        tokens = self._encode_parts(parts)
        blanked = controls.blanked(chat)
        if blanked != chat and controls.in_tokens(tokens) != self._placed(blanked, controls):
            raise InputError(_field(chat), FORGED)
        return tokens

    def _placed(self, blanked: dict[str, Any], controls: ControlTokens) -> list[int]:
        """The control tokens of the template alone."""
        text = self._render(blanked)
        if self._reads_literally:  # then nothing needs to be tokenized a second time
            return controls.in_text(text)
        return controls.in_tokens(self._inner.encode(text, add_special_tokens=False))

    def _render(self, chat: dict[str, Any]) -> str:
        messages, options = chat["messages"], chat["options"]
        continued = options.continue_final_message
        given = with_end_marked(messages) if continued else messages
        try:
            text = render_chat(self._inner, given, options.add_generation_prompt, chat["names"])
        except (QuestionRefused, ConfinedProcessEnded) as error:
            raise InputError(_field(chat), f"the chat template refused: {error}") from error
        return cut_at_end(text, messages[-1]["content"]) if continued else text

    def _encode_parts(self, parts: list[str]) -> list[int]:
        """The tokens of a text, none of which reaches from one part into the next."""
        tokens = self._inner.encode(parts[0], add_special_tokens=False)
        for part in parts[1:]:
            tokens += self._encode_further(part)
        return tokens

    def _encode_further(self, part: str) -> list[int]:
        """SentencePiece puts a space before the first word of a text: a line comes before it."""
        led = self._inner.encode_part(LEAD + part)
        size = len(self._lead)
        return led[size:] if led[:size] == self._lead else self._inner.encode_part(part)

    def _find_control_tokens(self) -> ControlTokens | None:
        template = self.chat_template + (self._inner.tool_template or "")
        return find_control_tokens(self._inner.added_tokens(), self._inner.special_ids, template)

    def _is_literal(self, controls: ControlTokens) -> bool:
        """Whether a control token is found wherever it is spelled, and nowhere else."""
        found = (self._inner.encode_part(spelling) for spelling in controls.spellings)
        return controls.are_literal and [*found] == [[i] for i in controls.spellings.values()]

    def _check_ids(self, directory: Path, known: set[int]) -> None:
        """The rules by which tokens are added name them with any id."""
        for token in set(self._inner.encode(PROBE)) - known:
            raise ModelError(
                f"{directory / TOKENIZER}: post_processor: ids of the vocabulary are needed, "
                f"got {token}"
            )

    def _check_bytes(self, directory: Path) -> None:
        """The bytes of tokens must spell what the tokenizer itself decodes."""
        ids = self._inner.encode(PROBE, add_special_tokens=False)
        if any(token in self._beyond for token in ids):
            return
        spelled = b"".join(self.token_bytes[i] for i in ids).decode("utf-8", "replace")
        decoded = self._inner.decode(ids)
        # SentencePiece puts a space before the first word and takes it away when decoding.
        if spelled != decoded and spelled.removeprefix(" ") != decoded:
            raise ModelError(f"{directory}: this kind of tokenizer is not supported")

    def check_template(self) -> None:
        """A template may refuse a message; one that cannot be compiled, or has no end, refuses all
        of them. For whoever renders chats."""
        if not self.has_chat_template:
            return
        trial = chat_question(self._inner, [{"role": "user", "content": "x"}], False)
        try:
            RENDERERS.ask(trial)  # and no caller waits for the start of the process
        except QuestionsRefused as error:
            raise ModelError(
                f"{self._template_source}: the chat template is broken: {reason_of(error)}"
            ) from None
        except ConfinedProcessEnded as error:
            raise ModelError(
                f"{self._template_source}: the chat template cannot be used: {error}"
            ) from None
        except QuestionRefused:
            log.debug("the chat template refuses a lone user message", exc_info=True)

    def _text_fingerprint(self) -> str:
        """Equal for tokenizers that turn every text and chat into the same ids."""
        guarded = self._controls is not None and self.has_chat_template
        parts = (
            self.fingerprint,
            self._inner.serialized(),
            self._inner.chat_template,
            *([self._inner.tool_template] if self._inner.tool_template else ()),
            *(("control tokens are the template's",) if guarded else ()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids the same bytes."""
        digest = hashlib.sha256()
        for token in self.token_bytes:
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update(json.dumps(sorted(self._inner.special_ids)).encode())
        return digest.hexdigest()[:32]


def _field(chat: dict[str, Any]) -> str:
    return "chat" if chat["names"] else chat["options"].field


def render_chat(
    tokenizer: Backend,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    names: Mapping[str, Any] | None = None,
) -> str:
    """Messages through the chat template. ``names``: further ones."""
    return RENDERERS.ask(chat_question(tokenizer, messages, add_generation_prompt, names))


def chat_question(
    tokenizer: Backend,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    names: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Messages and the chat template, as a question to those who render them."""
    every_name = {
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **tokenizer.template_names,
        **(names or {}),
    }
    template = tokenizer.chat_template
    if every_name["tools"] and tokenizer.tool_template is not None:
        template = tokenizer.tool_template
    return {"template": template, "names": every_name}


def _load(directory: Path, architecture: str) -> Backend:
    try:
        # For Qwen2, transformers takes a class of its own, whatever is named.
        generic = architecture != "qwen2" and is_generic(directory)
        _try_out(directory)
        plain = load_plain(directory) if generic else None
        return plain or TransformersTokenizer(directory, generic)
    except ModelError:
        raise
    except Exception as error:  # many kinds; the user needs the first line
        raise _not_loaded(directory, error) from error


def _try_out(directory: Path) -> None:
    """Tries the tokenizer out in a process that may end over it. One that has passed, or is part of
    the package, need not."""
    file = directory / TOKENIZER
    if not is_there(file):
        if not any(is_there(directory / name) for name in SOURCES):
            raise ModelError(f"{file} does not exist: a tokenizer is needed")
        return  # transformers makes one
    digest = hashlib.sha256(read_bytes(file, LISTING_BYTES)).digest()
    if digest in PASSED or SHIPPED in file.resolve().parents:
        return
    try:
        with closing(ConfinedProcess(TRIAL, memory=4 << 30, seconds=60)) as trial:
            trial.ask({"file": str(file), "text": PROBE})
    except (QuestionRefused, ConfinedProcessEnded) as error:
        raise _not_loaded(file, error) from None
    PASSED.add(digest)


def _not_loaded(source: Path, error: Exception) -> ModelError:
    return ModelError(f"{source}: the tokenizer cannot be loaded: {reason_of(error)}")


class TransformersTokenizer:
    """A tokenizer that transformers loads: by its generic class, or by the one that it finds for
    the directory, which imports torch."""

    def __init__(self, directory: Path, generic: bool) -> None:
        check_files(directory)
        import transformers

        own_log = transformers.utils.logging  # else it has a handler, and a format, of its own
        own_log.disable_default_handler()
        own_log.enable_propagation()
        kind = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
        self._inner = kind.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        if not self._inner.is_fast:
            raise ModelError(f"{directory}: a fast tokenizer (tokenizer.json) is needed")
        self._fast = self._inner.backend_tokenizer
        self._fast.no_truncation()  # transformers sees to it only in calls of its own
        self._fast.no_padding()
        templates = self._inner.chat_template
        named = templates if isinstance(templates, dict) else {"default": templates}
        self.chat_template: str | None = named.get("default")
        self.tool_template: str | None = named.get("tool_use")
        self.template_names: Mapping[str, Any] = _as_texts(self._inner.special_tokens_map)
        self.special_ids: list[int] = self._inner.all_special_ids
        options = inspect.signature(self._inner.apply_chat_template).parameters
        self.reserved_names = frozenset([*options, *self._inner.special_tokens_map])

    def vocabulary(self) -> dict[str, int]:
        return self._inner.get_vocab()

    def added_tokens(self) -> Mapping[int, Any]:
        return self._inner.added_tokens_decoder

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def encode_part(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(tokens, skip_special_tokens=True)

    def serialized(self) -> str:
        return self._fast.to_str()


def _as_texts(tokens: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [str(each) for each in token] if isinstance(token, list | tuple) else str(token)
        for name, token in tokens.items()
    }


def token_bytes(tokenizer: Backend, vocab_size: int) -> list[bytes]:
    """The bytes of each token id; special tokens, and ids without a token, have none."""
    added = tokenizer.added_tokens()
    spell = _spell_byte_level if _is_byte_level(tokenizer) else _spell_sentencepiece
    table = [b""] * vocab_size
    for token, index in tokenizer.vocabulary().items():
        if index >= vocab_size:
            continue
        if index in added:
            table[index] = b"" if added[index].special else str(added[index].content).encode()
        else:
            table[index] = spell(token)
    return table


def control_spellings(tokenizer: Backend, vocab_size: int) -> dict[int, bytes]:
    """Special tokens as they are written, by their ids."""
    added = tokenizer.added_tokens().items()
    return {
        i: str(token.content).encode() for i, token in added if token.special and i < vocab_size
    }


def _is_byte_level(tokenizer: Backend) -> bool:
    decoder = json.loads(tokenizer.serialized()).get("decoder") or {}
    parts = [decoder, *decoder.get("decoders", [])]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[c] for c in token)
    except KeyError:
        raise ModelError(f"tokenizer: token {token!r} is not spelled in bytes") from None


def _spell_sentencepiece(token: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()
