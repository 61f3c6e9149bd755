"""A tokenizer that is tried before a service loads it. Run as a program, it tries what it is asked
to.

What a tokenizer.json says can end the process that reads it, or make it wait: an id for which there
is no memory, a pattern that matches in too many ways, rules that refer to nothing.
"""

from typing import Any

import tokenizers

from ssd_engine.text.confined.answers import answer_questions


def try_out(question: dict[str, Any]) -> str:
    """Load ``file``, and turn ``text`` to tokens and back."""
    tokenizer = tokenizers.Tokenizer.from_file(question["file"])
    tokens = tokenizer.encode(question["text"], add_special_tokens=True).ids
    tokenizer.decode(tokens)
    tokenizer.get_vocab()
    tokenizer.to_str()
    return ""


if __name__ == "__main__":
    answer_questions(try_out)
