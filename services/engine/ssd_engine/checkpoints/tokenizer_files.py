"""The files of a tokenizer, as far as they are looked at before a library reads them. No torch
here."""

from pathlib import Path
from typing import Any

from ssd_engine.checkpoints.files.model_files import (
    LISTING_BYTES,
    Fields,
    is_integer,
    is_there,
    open_file,
    read_object,
    read_text,
)

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
SOURCES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")  # other kinds
# What transformers may read besides.
OTHERS = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
LEGACY = ("added_tokens.json", "special_tokens_map.json")
NAMED = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MAX_TOKENS = 1 << 24  # libraries have room for every id up to the highest


def read_tokenizer(directory: Path) -> dict[str, Any]:
    """The content of tokenizer.json, whose tokens have ids that can be."""
    file = directory / TOKENIZER
    content = read_object(file, LISTING_BYTES)
    model, fields = Fields(file, content).nested("model"), Fields(file, content)
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict | list) or not 0 < len(vocabulary) <= MAX_TOKENS:
        raise model.problem("vocab", f"1 to {MAX_TOKENS} tokens and their ids are needed")
    if isinstance(vocabulary, dict) and not all(map(_is_id, vocabulary.values())):
        raise model.problem("vocab", f"ids that are integers in [0, {MAX_TOKENS}) are needed")
    for token in fields.items("added_tokens"):
        if not (isinstance(token, dict) and _is_id(token.get("id"))):
            raise fields.problem("added_tokens", "objects, each with the id of a token, are needed")
        if not isinstance(token.get("content"), str):
            raise fields.problem("added_tokens", f"token {token['id']} needs a string as content")
    return content


def _is_id(value: Any) -> bool:
    return is_integer(value) and 0 <= value < MAX_TOKENS


def read_settings(directory: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty where there is none."""
    file = directory / SETTINGS
    settings = read_object(file, LISTING_BYTES) if is_there(file) else {}
    fields = Fields(file, settings)
    fields.text("tokenizer_class", "")
    added = fields.nested("added_tokens_decoder").values
    if not all(key.isdecimal() and len(key) < 9 and _is_id(int(key)) for key in added):
        raise fields.problem(
            "added_tokens_decoder", f"keys that are integers in [0, {MAX_TOKENS}) are needed"
        )
    for name in NAMED:
        if not isinstance(fields.get(name), str | dict | None):
            raise fields.wrong(name, "a string, or an object that describes a token,")
    _check_templates(fields)
    return settings


def _check_templates(fields: Fields) -> None:
    """One chat template, or a list of several with their names."""
    template = fields.get("chat_template")
    if isinstance(template, str | None):
        return
    if not isinstance(template, list):
        raise fields.wrong("chat_template", "a string, or a list of named templates,")
    for each in template:
        parts = [each.get(key) for key in ("name", "template")] if isinstance(each, dict) else [0]
        if not all(isinstance(part, str) for part in parts):
            raise fields.problem(
                "chat_template", "objects, each with the strings name and template, are needed"
            )


def read_template(directory: Path, settings: dict[str, Any]) -> Any:
    """The chat template: a file of its own comes before the setting."""
    file = directory / TEMPLATE
    return read_text(file) if is_there(file) else settings.get("chat_template")


def count_tokens(directory: Path) -> int | None:
    """One more than the highest token id of the tokenizer; None where there is no tokenizer.json.

    Published models pad the rows of their head, each size of a family in its own way.
    """
    if not is_there(directory / TOKENIZER):
        return None  # whoever loads the tokenizer says so
    content, settings = read_tokenizer(directory), read_settings(directory)
    vocabulary = content["model"]["vocab"]
    ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else [*vocabulary.values()]
    ids += [token["id"] for token in content.get("added_tokens") or ()]
    ids += [int(token) for token in settings.get("added_tokens_decoder") or ()]
    return int(max(ids)) + 1


def check_files(directory: Path) -> None:
    """Nothing that transformers may read is a pipe, which it would wait for for ever."""
    for pattern in OTHERS:
        for path in directory.glob(pattern):
            if path.is_dir() or not path.exists():
                continue  # it passes over these, or says what it misses
            open_file(path).close()
    for name in LEGACY:
        if is_there(directory / name):
            read_object(directory / name, LISTING_BYTES)
