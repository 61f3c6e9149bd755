"""Control tokens begin and end the turns of a chat: a chat template places them, a request cannot.

A template turns messages into text, and a tokenizer finds control tokens wherever the text spells
them. Two copies of the strings of a request tell who spelled one:

* ``marked``: whatever spells a control token has one character replaced by its mark, a lone
  surrogate, which no string from the wire contains. A template may trim, split, cut or quote the
  string; where a mark comes out, the text is cut in two, and no token reaches across.
* ``blanked``: no string of the request can contribute to a control token. The tokens of this copy
  are the template's own. A prompt that has others contains one that was put together while
  rendering, of several strings or around a part that the template removes.
"""

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any

BLANK = "\ufffd"
FIRST_MARK = 0xDC00
# Some tokenizers do not call a token special that begins a turn, but spell it like one. Tags such
# as <think> and <tool_call> are not control tokens: models write them into their answers.
LOOKS_LIKE_ONE = re.compile(r"<[|｜].*|.*[|｜]>", re.DOTALL)
# Templates put a role between signs of their own ('<|' + role + '|>').
ROLES = ("system", "developer", "user", "assistant", "tool")


def find_control_tokens(
    added: Mapping[int, Any], special_ids: Collection[int], template: str
) -> "ControlTokens | None":
    """``special_ids``: those that the tokenizer has a name for, such as its end token."""
    ids = {i for i, token in added.items() if _is_control(token, i in special_ids)}
    return ControlTokens(added, ids, template) if ids else None


def _is_control(token: Any, named: bool) -> bool:
    """A line feed is text, whatever a tokenizer says of it."""
    looks = named or token.special or LOOKS_LIKE_ONE.fullmatch(token.content) is not None
    return looks and len(token.content.strip()) > 1


class ControlTokens:
    """The control tokens of one tokenizer: those in ``ids``, among all that were ``added`` to its
    vocabulary. ``template`` is its chat template."""

    def __init__(self, added: Mapping[int, Any], ids: Collection[int], template: str) -> None:
        controls = {i: token for i, token in added.items() if i in ids}
        self.ids = frozenset(controls)
        self.spellings = {token.content: i for i, token in controls.items()}
        self._spelled = _any_of(self.spellings)
        marked = sorted({_before_cut(spelling) for spelling in self.spellings})
        self._marks = {sign: chr(FIRST_MARK + i) for i, sign in enumerate(marked)}
        self._signs_of_marks = str.maketrans({mark: sign for sign, mark in self._marks.items()})
        self._cuts = re.compile(f"(?<=[{''.join(self._marks.values())}])")
        self._signs = re.compile(f"[{re.escape(''.join(_signs(self.spellings)))}]")
        self._template = template
        # Normalized tokens are looked for in a text that only the tokenizer knows.
        literal = {i: token for i, token in added.items() if not token.normalized}
        self._ids_of = {token.content: i for i, token in literal.items()}
        self._added = _any_of(self._ids_of)
        self.are_literal = all(
            i in literal and not token.single_word for i, token in controls.items()
        )

    # What a template gets

    def marked(self, value: Any) -> Any:
        """The strings of a request, with marks where they spell control tokens."""
        match value:
            case str():
                return self._marked_text(value)
            case list():
                return [self.marked(each) for each in value]
            case dict():
                return {self._marked_text(key): self.marked(each) for key, each in value.items()}
        return value

    def _marked_text(self, text: str) -> str:
        found = self._spelled.search(text)
        if found is None:
            return text
        characters = list(text)
        while found is not None:
            place = found.start() + _cut(found[0]) - 1
            characters[place] = self._marks[text[place]]
            found = self._spelled.search(text, found.start() + 1)  # they may overlap
        return "".join(characters)

    def blanked(self, value: Any) -> Any:
        """The strings of a request, without what could become a part of a control token."""
        match value:
            case str():
                return self._blanked_text(value)
            case list():
                return [self.blanked(each) for each in value]
            case dict():
                return {self._without_signs(key): self.blanked(each) for key, each in value.items()}
        return value

    def _blanked_text(self, text: str) -> str:
        return BLANK * len(text) if self._is_inner_part(text) else self._without_signs(text)

    def _without_signs(self, text: str) -> str:
        """A tokenizer may normalize: signs in other forms count as well."""
        plain = unicodedata.normalize("NFKC", text)
        if self._signs.search(text) is None and self._signs.search(plain) is None:
            return text
        normal = unicodedata.normalize("NFKC", self._signs.sub(BLANK, text))
        return self._signs.sub(BLANK, normal)

    def _is_inner_part(self, text: str) -> bool:
        """Whether signs of the template around it could make a control token of a string that is
        no word of the template's own."""
        word = text.strip()
        if not word or word in ROLES or not any(word in each for each in self.spellings):
            return False
        return f"'{word}'" not in self._template and f'"{word}"' not in self._template

    # What comes out of it

    def parts(self, rendered: str) -> list[str]:
        """The rendered text of a marked request, cut where its marks were."""
        return [self.restored(part) for part in self._cuts.split(rendered)]

    def restored(self, text: str) -> str:
        return text.translate(self._signs_of_marks)

    def in_tokens(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token in self.ids]

    def in_text(self, text: str) -> list[int]:
        """Control tokens that a tokenizer finds in a text, where they are literal."""
        return self.in_tokens([self._ids_of[spelling] for spelling in self._added.findall(text)])


def _any_of(spellings: Collection[str]) -> re.Pattern[str]:
    """The longest comes first, as in tokenizers."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _cut(spelling: str) -> int:
    """The place after the signs that a spelling begins with: tokenizers end a word there, too."""
    signs = next((i for i, each in enumerate(spelling) if _is_of_word(each)), 0)
    return max(signs, 1)


def _before_cut(spelling: str) -> str:
    return spelling[_cut(spelling) - 1]


def _signs(spellings: Collection[str]) -> set[str]:
    """Characters that are not of words: at least one of every spelling."""
    return {
        sign
        for spelling in spellings
        for sign in [each for each in spelling if not _is_of_word(each)] or spelling[:1]
    }


def _is_of_word(character: str) -> bool:
    return character.isalnum() or character == "_"
