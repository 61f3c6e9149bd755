"""A compiler of grammars for the shipped model's tokens."""

import pytest

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    directory = resolve_model("stories-target")
    return Tokenizer(directory, load_model_config(directory))


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.serialized(), len(tokenizer.token_bytes), [1])
