"""A tokenizer that is all in its files, read by the library that runs it.

transformers comes to the same, but takes a second to import. Whatever a directory asks for that is
not known here is left to it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ssd_engine.checkpoints.tokenizer_files import (
    NAMED,
    TOKENIZER,
    read_settings,
    read_template,
    read_tokenizer,
)

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
EXTRA = ("additional_special_tokens", "extra_special_tokens")
# Settings that say which tokens are special, and settings that change no text.
KNOWN = {
    *NAMED,
    *EXTRA,
    *("added_tokens_decoder", "chat_template", "tokenizer_class"),
    *("backend", "clean_up_tokenization_spaces", "model_input_names", "model_max_length"),
    *("padding_side", "truncation_side", "is_local", "local_files_only", "name_or_path"),
}
UNKNOWN_FILES = ("added_tokens.json", "additional_chat_templates", "chat_template.json")
LEGACY_FILE = "special_tokens_map.json"  # counts where the settings list no added tokens


class PlainTokenizer:
    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        named: dict[str, str],
        extra: list[str],
        chat_template: str | None,
    ) -> None:
        self._inner = inner
        self.template_names: Mapping[str, Any] = named
        self.reserved_names = frozenset(named)
        self.chat_template = chat_template
        self.tool_template: str | None = None
        special = dict.fromkeys([*named.values(), *extra])
        self.special_ids = [i for i in map(inner.token_to_id, special) if i is not None]

    def vocabulary(self) -> dict[str, int]:
        return self._inner.get_vocab()

    def added_tokens(self) -> Mapping[int, Any]:
        return self._inner.get_added_tokens_decoder()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Other threads go on meanwhile, as they do not with ``encode``."""
        (found,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def encode_part(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=True)

    def serialized(self) -> str:
        return self._inner.to_str()


def is_generic(directory: Path) -> bool:
    """Whether no class of a certain model is asked for, and the file is there that says all."""
    named = read_settings(directory).get("tokenizer_class")
    return named in GENERIC and (directory / TOKENIZER).exists()


def load_plain(directory: Path) -> PlainTokenizer | None:
    """The tokenizer of a directory that is generic; None for what transformers has to read."""
    content, settings = read_tokenizer(directory), read_settings(directory)
    named = {name: settings[name] for name in NAMED if settings.get(name) is not None}
    lists = [settings[name] for name in EXTRA if settings.get(name)]
    extra: list[str] = lists[0] if lists else []
    template = read_template(directory, settings)
    added = content.get("added_tokens") or []
    understood = (
        settings.keys() <= KNOWN
        and not any((directory / name).exists() for name in UNKNOWN_FILES)
        and (not (directory / LEGACY_FILE).exists() or "added_tokens_decoder" in settings)
        and not (content.get("truncation") or content.get("padding"))
        and content.get("post_processor")
        and len(lists) <= 1
        and isinstance(extra, list)
        and _are_special([*named.values(), *extra], added)
        and _agree(settings, added)
        and isinstance(template, str | None)
    )
    if not understood:
        return None
    inner = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER))
    return PlainTokenizer(inner, named, extra, template)


def _are_special(tokens: Sequence[Any], added: Sequence[Mapping[str, Any]]) -> bool:
    """Each is in the file as what it is said to be: nothing has to be added."""
    special = {token["content"] for token in added if token.get("special")}
    return all(isinstance(token, str) and token in special for token in tokens)


def _agree(settings: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> bool:
    """The settings may list the added tokens once more; they do not always say the same."""
    told = settings.get("added_tokens_decoder")
    if told is None:
        return True
    return {int(index): token for index, token in told.items()} == {
        token["id"]: {key: value for key, value in token.items() if key != "id"} for token in added
    }
