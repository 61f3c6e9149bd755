"""A tokenizer that is all in its files, read by the library that runs it.

transformers comes to the same, but takes a second to import. Whatever a directory asks for that is
not known here is left to it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
NAMED = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
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
TRAINING_TAG = "endgeneration"  # marks what an assistant said: an extension of transformers


class PlainTokenizer:
    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        named: dict[str, str],
        extra: list[str],
        chat_template: str | None,
    ) -> None:
        self._inner = inner
        self._named = named
        self.reserved_names = frozenset(named)
        self.chat_template = chat_template
        special = dict.fromkeys([*named.values(), *extra])
        self.special_ids = [i for i in map(inner.token_to_id, special) if i is not None]

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._inner.get_vocab()
        return vocabulary

    def added_tokens(self) -> Mapping[int, Any]:
        added: Mapping[int, Any] = self._inner.get_added_tokens_decoder()
        return added

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Other threads go on meanwhile, as they do not with ``encode``."""
        (found,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def encode_part(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode(list(tokens), skip_special_tokens=True)
        return text

    def serialized(self) -> str:
        text: str = self._inner.to_str()
        return text

    def use_template(self, template: str) -> None:
        self.chat_template = template

    def render(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, **names: Any
    ) -> str:
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._named,
            **names,
        )

    @cached_property
    def _template(self) -> Template:
        """Compiled once: a chat is rendered for every request."""
        return _environment().from_string(self.chat_template or "")


def is_generic(directory: Path) -> bool:
    """Whether no class of a certain model is asked for, and the file is there that says all."""
    settings = _settings(directory)
    return settings.get("tokenizer_class") in GENERIC and (directory / "tokenizer.json").exists()


def load_plain(directory: Path) -> PlainTokenizer | None:
    """The tokenizer of a directory that is generic; None for what transformers has to read."""
    file, settings = directory / "tokenizer.json", _settings(directory)
    content = json.loads(file.read_text())
    named = {name: settings[name] for name in NAMED if settings.get(name) is not None}
    lists = [settings[name] for name in EXTRA if settings.get(name)]
    extra: list[str] = lists[0] if lists else []
    template = _template(directory, settings)
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
        and TRAINING_TAG not in (template or "")
    )
    if not understood:
        return None
    return PlainTokenizer(tokenizers.Tokenizer.from_file(str(file)), named, extra, template)


def _settings(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return settings


def _template(directory: Path, settings: Mapping[str, Any]) -> Any:
    """A file of its own comes before the setting."""
    file = directory / "chat_template.jinja"
    return file.read_text() if file.exists() else settings.get("chat_template")


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


# Chat templates: code of strangers, in a sandbox, with the names that transformers gives it.


class _OpenNames(Namespace):
    """What ``namespace()`` makes: no name of Python's own can be hidden in it."""

    def __init__(*arguments: Any, **names: Any) -> None:
        self, *rest = arguments
        given = dict(*rest, **names)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not keep a name such as {name!r}")


class _Dictionaries:
    """In place of the class ``dict``."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dictionaries()
    environment.globals["namespace"] = _OpenNames
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As it is: Jinja's own filter is made for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
