"""Words of others as token ids: whatever they say, they are never one of the tokens that steer a model.

What an environment answers, and what a row's user says, may spell `<|im_end|>` or the placeholder of an image. Only the
chat template writes such tokens. In words they are text, encoded as any other. Words without them are encoded together
with what the template writes around them, as ever.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import attrs
from transformers import PreTrainedTokenizerBase

from cosmos_core.errors import DataError


@attrs.frozen(kw_only=True)
class Guarded:
    """Words in which marks stand for what spells steering tokens.

    Attributes:
        texts: The words, in the order given.
        spelt: What each mark stands for.
    """

    texts: tuple[str, ...]
    spelt: Mapping[str, str]


class Words:
    """Encodes words beside what a template writes.

    Args:
        tokenizer: The tokenizer.
        stops: Tokens that end a completion; those of the ordinary vocabulary, such as the end of a line, are words all
            the same.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> None:
        self.tokenizer: Final = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {id_ for id_, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        # What no token spells becomes the unknown token; that steers nothing, unless it ends completions, too.
        special -= {tokenizer.unk_token_id} - set(stops)
        self._steering: Final = frozenset(filter(self._is_apart, special)) | (added.keys() & set(stops) - special)
        texts = {token for id_ in self._steering if isinstance(token := tokenizer.convert_ids_to_tokens(id_), str)}
        longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
        self._pattern: Final = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spells(self, text: str) -> str:
        """The first steering token that a text spells; empty if it spells none."""
        found = self._pattern.search(text)
        return found.group() if found else ""

    def ids(self, text: str) -> list[int]:
        """Words alone.

        Raises:
            DataError: The tokenizer makes a steering token of them all the same.
        """
        if not self.spells(text):
            return self._checked(text)
        guarded = self.guarded([text])
        return self.joined(guarded.texts[0], guarded.spelt)

    def guarded(self, texts: Sequence[str]) -> Guarded:
        """Words that a template can write as they are, and whose ids `joined` makes.

        Raises:
            DataError: The tokenizer makes a steering token of what spells none, as one that normalises may.
        """
        for text in texts:
            for piece in self._pattern.split(text):
                self._checked(piece)
        found = sorted({spelt for text in texts for spelt in self._pattern.findall(text)})
        base = "%spelt"
        while any(base in text for text in texts):
            base += "%spelt"
        marks = {spelt: f"{base}-{index}%" for index, spelt in enumerate(found)}
        put = tuple(self._pattern.sub(lambda match: marks[match.group()], text) for text in texts)
        return Guarded(texts=put, spelt={mark: spelt for spelt, mark in marks.items()})

    def joined(self, text: str, spelt: Mapping[str, str]) -> list[int]:
        """A text with marks: what stands between them as it is, what they stand for as words.

        Args:
            text: What a template wrote of guarded words.
            spelt: What each mark stands for.

        Raises:
            DataError: What a mark stands for cannot be encoded as words.
        """
        if not spelt:
            return self._encoded(text)
        pieces = re.split("(" + "|".join(map(re.escape, spelt)) + ")", text)
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            ids += self._spelt(spelt[piece]) if index % 2 else self._encoded(piece)
        return ids

    def _is_apart(self, special: int) -> bool:
        """Whether its text, as words, is encoded otherwise; a special token may be of the ordinary vocabulary, too."""
        text = self.tokenizer.convert_ids_to_tokens(special)
        return isinstance(text, str) and special not in self._encoded(text, split_special_tokens=True)

    def _encoded(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)[
            "input_ids"
        ]
        return ids

    def _spelt(self, token: str) -> list[int]:
        """The text of a steering token; sign by sign where the tokenizer knows it as no special one."""
        ids = self._encoded(token, split_special_tokens=True)
        if self._steering.isdisjoint(ids):
            return ids
        return [id_ for sign in token for id_ in self._checked(sign)]

    def _checked(self, text: str) -> list[int]:
        ids = self._encoded(text)
        if steering := self._steering.intersection(ids):
            token = self.tokenizer.convert_ids_to_tokens(min(steering))
            raise DataError(
                f"the words {text!r:.80} hold what the tokenizer takes for the token {token!r}, which only a chat "
                "template may write; leave it out of what the environment answers, or of the row"
            )
        return ids
