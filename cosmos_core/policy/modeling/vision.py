"""Any Hugging Face vision-language model: the building block of model plugins for those.

Text, packing, attention over documents and the output layer are those of `HuggingFaceModel`, on the text backbone. The
vision tower keeps its own attention; what it sees takes the places of placeholder tokens.

Shape legend: U units of a packed row, D hidden size.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cosmos_core.errors import ConfigError
from cosmos_core.policy.modeling.attention.packed import PACKED
from cosmos_core.policy.modeling.huggingface import HuggingFaceModel
from cosmos_core.policy.modeling.parallel.stages import stages_of
from cosmos_core.policy.modeling.tokenizer import FILE as TOKENIZER_FILE
from cosmos_core.policy.modeling.tokenizer import build_tokenizer
from cosmos_core.policy.modeling.weights import loading
from cosmos_core.protocols import Layout

TOWER_ATTENTION = "sdpa"


class VisionLanguageModel(HuggingFaceModel):
    """A vision-language model of transformers, with a `text_config` and a text backbone of its own.

    Attributes:
        special_tokens: What a tokenizer made locally has to know besides the usual, for each the name under which the
            config keeps its id, or None.
    """

    auto_class: ClassVar[Any] = AutoModelForImageTextToText
    special_tokens: ClassVar[Mapping[str, str | None]] = {}

    def build(
        self, *, seed: int, dtype: torch.dtype, device: torch.device, layout: Layout | None = None
    ) -> torch.nn.Module:
        """Make the module (see `HuggingFaceModel.build`); towers other than the text's see all of what they are shown.

        Raises:
            CosmosError: A checkpoint is missing, truncated or of another architecture, or the model cannot be packed.
        """
        module = super().build(seed=seed, dtype=dtype, device=device, layout=layout)
        for stage in stages_of(module):
            assert isinstance(stage, PreTrainedModel)
            towers = {name: TOWER_ATTENTION for name in stage.config.sub_configs if name != "text_config"}
            stage.set_attn_implementation({"": PACKED, "text_config": PACKED, **towers})
        return module

    def backbone(self, module: torch.nn.Module) -> torch.nn.Module:
        """The text backbone: what is seen has become embeddings by then (`embed`)."""
        text: torch.nn.Module = module.get_decoder()  # type: ignore[operator]
        return text

    def prepare(self, corpus: Iterable[str], tokenizer: Mapping[str, Any]) -> None:
        """Train the tokenizer into `context.assets`, and write the resolved config beside it.

        A recipe's config without a vocabulary size or ids of special tokens takes those of the tokenizer.

        Raises:
            ConfigError: `tokenizer` asks for what cannot be made, or the config has an unknown key.
        """
        made = build_tokenizer(corpus, tokenizer)
        made.add_special_tokens({"additional_special_tokens": list(self.special_tokens)})
        self.context.assets.mkdir(parents=True, exist_ok=True)
        made.save_pretrained(self.context.assets)
        if self.context.config is not None:
            self._resolved(self.context.config, made).save_pretrained(self.context.assets)
        self._config = self._tokenizer = self._facts = None

    def _find_config(self) -> PretrainedConfig:
        """The config; beside a tokenizer made locally, special tokens have the ids that it gave them."""
        config = super()._find_config()
        if self.context.path is not None and (self.context.assets / TOKENIZER_FILE).is_file():
            for token, name in self.special_tokens.items():
                if name is not None:
                    setattr(config, name, self.tokenizer.convert_tokens_to_ids(token))
        return config

    def _resolved(self, config: Mapping[str, Any], made: PreTrainedTokenizerBase) -> Any:
        _check_parts(config)
        ids = {name: made.convert_tokens_to_ids(token) for token, name in self.special_tokens.items() if name}
        text = {
            "vocab_size": len(made),
            "pad_token_id": made.pad_token_id,
            "bos_token_id": made.bos_token_id,
            "eos_token_id": made.eos_token_id,
            **dict(config.get("text_config") or {}),
        }
        return loading.config_from_mapping({**ids, **config, "text_config": text})


def _check_parts(config: Mapping[str, Any]) -> None:
    """Refuse unknown keys in the tables of a config: transformers would carry them along unread."""
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return  # told in full when the config is made
    for part, part_class in CONFIG_MAPPING[model_type].sub_configs.items():
        known = part_class()
        for key in config.get(part) or ():
            if key not in loading.EXTRA_KEYS and not hasattr(known, key):
                near = difflib.get_close_matches(key, [name for name in vars(known) if not name.startswith("_")], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"model.config.{part}.{key}: {part_class.__name__} has no such option{hint}")
