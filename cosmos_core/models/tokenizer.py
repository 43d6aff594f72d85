"""The tokenizer: loaded from a checkpoint, or a byte-level BPE trained on the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name

from cosmos_core.errors import ConfigError, DataError

PAD: Final = "<pad>"
BOS: Final = "<bos>"
EOS: Final = "<eos>"
FILE: Final = "tokenizer.json"


_EMPTY: Final = 1
"""Tokens, besides added ones, of a tokenizer that knows no text."""


def train_byte_bpe(corpus: Iterable[str], *, vocab_size: int, split_digits: bool) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: any text can be encoded, and decodes to itself.

    Args:
        corpus: Texts to learn merges from.
        vocab_size: Most entries, the 256 bytes and three special tokens included.
        split_digits: Whether each digit stays a token of its own.
    """
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
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


def build_tokenizer(corpus: Iterable[str], settings: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Make what `[model.tokenizer]` asks for.

    Raises:
        ConfigError: `settings["build"]` is unknown.
    """
    if settings["build"] != "byte-bpe":
        raise ConfigError(f"model.tokenizer.build: {settings['build']!r} is unknown; use 'byte-bpe'")
    return train_byte_bpe(corpus, vocab_size=settings["vocab_size"], split_digits=settings["split_digits"])


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
        raise DataError(f"model: no usable tokenizer at {where}: {_first_line(error)}") from error
    if loaded.vocab_size <= _EMPTY:
        # What transformers makes of a folder without a tokenizer's files.
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
