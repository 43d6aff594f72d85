"""Words of users, tools and environments as token ids that steer nothing.

What an environment answers, and what a row's user says, may spell `<|im_end|>` or the placeholder of an image. Only the
chat template writes such tokens. In words they are text, encoded as any other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from transformers import PreTrainedTokenizerBase

from cosmos_core.errors import DataError

Joined: TypeAlias = Callable[[str, Mapping[str, str]], list[int]]
"""See `Words.joined`."""


class Words:
    """Encodes words beside what a template writes.

    Of the tokens in `stops`, which end a completion, those of the ordinary vocabulary, such as the end of a line, are
    words all the same.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> None:
        self.tokenizer: Final = tokenizer
        self.stops: Final = frozenset(stops)
        added = tokenizer.added_tokens_decoder
        special = {id_ for id_, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        # What no token spells becomes the unknown token; that steers nothing, unless it ends completions, too.
        special -= {tokenizer.unk_token_id} - set(stops)
        self.steering: Final = frozenset(filter(self._is_apart, special)) | (added.keys() & set(stops) - special)
        texts = {token for id_ in self.steering if isinstance(token := tokenizer.convert_ids_to_tokens(id_), str)}
        longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
        self._pattern: Final = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        ends = [text for text in longest_first if tokenizer.convert_tokens_to_ids(text) in self.stops]
        self._ends: Final = re.compile("|".join(map(re.escape, ends)) or r"(?!)")
        # An episode's turns come again with each of its observations.
        self._checked: Final = functools.lru_cache(maxsize=256)(self._check)

    def spells(self, text: str) -> str:
        """The first steering token that a text spells; empty if it spells none."""
        found = self._pattern.search(text)
        return found.group() if found else ""

    def stop_in(self, text: str) -> re.Match[str] | None:
        """The first steering token in a text that ends a completion."""
        return self._ends.search(text)

    def without_steering(self, text: str) -> str:
        """A text without the steering tokens in it."""
        return self._pattern.sub("", text)

    def guarded(self, texts: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
        """Words that a template can write as they are, and whose ids `joined` makes.

        Marks stand in them for what spells steering tokens; the second says what each mark stands for. A DataError says
        that the tokenizer makes a steering token of what spells none, as one that normalises may.
        """
        for text in texts:
            for piece in self._pattern.split(text):
                self._checked(piece)
        found = sorted({spelt for text in texts for spelt in self._pattern.findall(text)})
        base = unsaid("%spelt", texts)
        marks = {spelt: f"{base}-{index}%" for index, spelt in enumerate(found)}
        put = [self._pattern.sub(lambda match: marks[match.group()], text) for text in texts]
        return put, {mark: spelt for spelt, mark in marks.items()}

    def joined(self, text: str, spelt: Mapping[str, str]) -> list[int]:
        """Text that a template wrote of guarded words: between marks as it is, and what these stand for as words.

        Raises:
            DataError: What a mark stands for cannot be encoded as words.
        """
        return [id_ for ids in self.pieces(text, spelt, self._encoded) for id_ in ids]

    def pieces(self, text: str, spelt: Mapping[str, str], encoded: Callable[[str], list[int]]) -> Iterator[list[int]]:
        """The same piece by piece; `encoded` encodes what is between marks."""
        if not spelt:
            yield encoded(text)
            return
        for piece in re.split("(" + "|".join(map(re.escape, spelt)) + ")", text):
            yield self._spelt(spelt[piece]) if piece in spelt else encoded(piece)

    def _is_apart(self, special: int) -> bool:
        """Tell whether its text, as words, is encoded otherwise; a special token may be an ordinary one, too."""
        text = self.tokenizer.convert_ids_to_tokens(special)
        return isinstance(text, str) and special not in self._encoded(text, split_special_tokens=True)

    def _encoded(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _spelt(self, token: str) -> list[int]:
        """The text of a steering token; sign by sign where the tokenizer knows it as no special one."""
        ids = self._encoded(token, split_special_tokens=True)
        if self.steering.isdisjoint(ids):
            return ids
        return [id_ for sign in token for id_ in self._checked(sign)]

    def _check(self, text: str) -> list[int]:
        ids = self._encoded(text)
        if steering := self.steering.intersection(ids):
            token = self.tokenizer.convert_ids_to_tokens(min(steering))
            raise DataError(
                f"the words {text!r:.80} hold what the tokenizer takes for the token {token!r}, which only a chat "
                "template may write; leave it out of what the environment answers, or of the row"
            )
        return ids


def unsaid(base: str, texts: Collection[str]) -> str:
    """A mark that is in none of the texts: the base, repeated."""
    mark = base
    while any(mark in text for text in texts):
        mark += base
    return mark


def strings(value: Any) -> Iterator[str]:
    """The texts of a JSON value, keys too, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings(each)


def with_strings(value: Any, texts: Iterator[str]) -> Any:
    """The same value with other texts, in the order of `strings`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, Mapping):
        return {next(texts): with_strings(each, texts) for each in value.values()}
    if isinstance(value, list | tuple):
        return type(value)(with_strings(each, texts) for each in value)
    return value
