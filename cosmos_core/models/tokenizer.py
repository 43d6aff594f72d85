"""The tokenizer: loaded from a checkpoint, or a byte-level BPE trained on the dataset.

What an environment answers, and what a row's user says, may spell `<|im_end|>` or the placeholder of an image. Only the
chat template writes such tokens. In words they are text, encoded as any other (`Words`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.weights.loading import first_line

PAD: Final = "<pad>"
BOS: Final = "<bos>"
EOS: Final = "<eos>"
FILE: Final = "tokenizer.json"


def build_tokenizer(corpus: Iterable[str], settings: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Train what `[model.tokenizer]` asks for, a byte-level BPE: any text can be encoded, and decodes to itself.

    The vocabulary includes the 256 bytes and three special tokens; split digits stay tokens of their own.
    """
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if settings["split_digits"] else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings["vocab_size"],
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    # Bytes are never unknown, but transformers may read an export with the class of the model's family, and that adds
    # an unknown token of its own, with an id beyond the vocabulary, where none is named.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=EOS
    )


def tokenizer_defaults(made: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Values of a config that depend on the tokenizer."""
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {"vocab_size": len(made), **{name: getattr(made, name) for name in special}}


def load_tokenizer(assets: Path, path: str | None, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer that was made for the run if there is one, else the checkpoint's.

    Raises:
        ConfigError: The checkpoint's is code of its own, which is not trusted.
        DataError: There is none, or it cannot be read.
    """
    try:
        if (assets / FILE).is_file():
            made: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(assets)
            return made
        if path is None:
            raise DataError(
                "model: no tokenizer; add [model.tokenizer] to make one from the dataset, or give model.path"
            )
        if not trust_remote_code:
            _refuse_code(path)
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        where = assets if (assets / FILE).is_file() else path
        raise DataError(f"model: no usable tokenizer at {where}: {first_line(error)}") from error
    if loaded.vocab_size <= 1:
        # It knows no text: what transformers makes of a folder without a tokenizer's files.
        raise DataError(
            f"model: no tokenizer at {path}; add [model.tokenizer] to make one from the dataset, or give model.path a "
            "checkpoint that has one"
        )
    return loaded


def default_template(named: str | Mapping[str, str] | None) -> str | None:
    """The template of chats of a tokenizer or processor, which may have several by name."""
    return named if named is None or isinstance(named, str) else named.get("default")


def _refuse_code(path: str) -> None:
    """Refuse a tokenizer that only code in the checkpoint can make: transformers would make another of its files."""
    said: Mapping[str, Any] = get_tokenizer_config(path)
    name = str(said.get("tokenizer_class") or "")
    if "AutoTokenizer" in (said.get("auto_map") or {}) and tokenizer_class_from_name(name) is None:
        raise ConfigError(
            f"model.trust_remote_code: false, but the tokenizer of {path!r} ({name or 'without a class'}) is code in "
            "the checkpoint; read that code, and set model.trust_remote_code = true to let it run"
        )


class Words:
    """Encodes words beside what a template writes.

    Of the tokens in `stops`, which end a completion, those of the ordinary vocabulary, such as the end of a line, are
    words all the same.
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
        # An episode's turns come again with each of its observations.
        self._checked: Final = functools.lru_cache(maxsize=256)(self._check)

    def spells(self, text: str) -> str:
        """The first steering token that a text spells; empty if it spells none."""
        found = self._pattern.search(text)
        return found.group() if found else ""

    def ids(self, text: str) -> list[int]:
        """Words alone."""
        if not self.spells(text):
            return list(self._checked(text))
        (guarded,), spelt = self.guarded([text])
        return self.joined(guarded, spelt)

    def guarded(self, texts: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
        """Words that a template can write as they are, and whose ids `joined` makes.

        Marks stand in them for what spells steering tokens; the second says what each mark stands for.

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
        put = [self._pattern.sub(lambda match: marks[match.group()], text) for text in texts]
        return put, {mark: spelt for spelt, mark in marks.items()}

    def joined(self, text: str, spelt: Mapping[str, str]) -> list[int]:
        """Text that a template wrote of guarded words: between marks as it is, and what these stand for as words.

        Raises:
            DataError: What a mark stands for cannot be encoded as words.
        """
        if not spelt:
            return self._encoded(text)
        pieces = re.split("(" + "|".join(map(re.escape, spelt)) + ")", text)
        return [
            id_ for piece in pieces for id_ in (self._spelt(spelt[piece]) if piece in spelt else self._encoded(piece))
        ]

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
        if self._steering.isdisjoint(ids):
            return ids
        return [id_ for sign in token for id_ in self._checked(sign)]

    def _check(self, text: str) -> list[int]:
        ids = self._encoded(text)
        if steering := self._steering.intersection(ids):
            token = self.tokenizer.convert_ids_to_tokens(min(steering))
            raise DataError(
                f"the words {text!r:.80} hold what the tokenizer takes for the token {token!r}, which only a chat "
                "template may write; leave it out of what the environment answers, or of the row"
            )
        return ids
