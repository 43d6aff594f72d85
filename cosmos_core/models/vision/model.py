"""Any Hugging Face vision-language model: the building block of model plugins for those.

Text, packing, attention over documents and the output layer are those of `HuggingFaceModel`, on the text backbone. The
vision tower keeps its own attention; what it sees takes the places of placeholder tokens.

Shape legend: U units of a packed row, D hidden size.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import attrs
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from cosmos_core.errors import ConfigError
from cosmos_core.models.conditioning import ConditionedModel
from cosmos_core.models.parallel.layout import leading_problems
from cosmos_core.models.tokenizer import FILE as TOKENIZER_FILE
from cosmos_core.models.tokenizer import build_tokenizer
from cosmos_core.models.vision.decoder import deeper_keywords, per_unit
from cosmos_core.models.weights import loading
from cosmos_core.protocols import Entering, Layout, ModelFacts


class VisionLanguageModel(ConditionedModel):
    """A vision-language model of transformers, with a `text_config` and a text backbone of its own.

    Attributes:
        special_tokens: What a tokenizer made locally has to know besides the usual, for each the name under which the
            config keeps its id, or None.
    """

    auto_class: ClassVar[Any] = AutoModelForImageTextToText
    special_tokens: ClassVar[Mapping[str, str | None]] = {}

    def facts(self) -> ModelFacts:
        """Describe the model without building weights (see `HuggingFaceModel.facts`)."""
        return attrs.evolve(super().facts(), num_leading_layers=self._num_deep)

    def build(
        self, *, seed: int, dtype: torch.dtype, device: torch.device, layout: Layout | None = None
    ) -> torch.nn.Module:
        """Make the module (see `HuggingFaceModel.build`).

        Raises:
            CosmosError: See there; and what is seen does not reach all the layers that it has to under this layout.
        """
        if layout is not None:
            self._check(layout)
        return super().build(seed=seed, dtype=dtype, device=device, layout=layout)

    def backbone(self, module: torch.nn.Module) -> torch.nn.Module:
        """The text backbone: what is seen has become embeddings by then (`embed`)."""
        text: torch.nn.Module = module.get_decoder()  # type: ignore[operator]
        return text

    def per_unit(self, entry: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Embeddings, and what deeper layers add, of each unit of a row (see `ConditionedModel.per_unit`)."""
        return per_unit(entry)

    def keywords(self, entering: Entering) -> Mapping[str, Any]:
        """What deeper layers add (see `ConditionedModel.keywords`)."""
        return deeper_keywords(entering)

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

    @property
    def _num_deep(self) -> int:
        """First layers to whose results what is seen is added (deepstack; arXiv 2406.04334)."""
        return len(getattr(getattr(self.config, "vision_config", None), "deepstack_visual_indexes", None) or ())

    def _check(self, layout: Layout) -> None:
        problems = leading_problems(
            self.config.model_type,
            self._num_deep,
            self.config.get_text_config().num_hidden_layers,
            num_stages=layout.mesh.size("pp") * layout.stages_per_rank,
            is_split=layout.sequence_parallel and layout.mesh.size("tp") > 1,
        )
        for problem in problems:
            raise ConfigError(problem)

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
    whole = CONFIG_MAPPING[model_type]
    for part in whole.sub_configs:
        given = config.get(part) or {}
        named = given.get("model_type")
        known = CONFIG_MAPPING[named]() if named in CONFIG_MAPPING else getattr(whole(), part)
        for key in given:
            if key not in loading.EXTRA_KEYS and not hasattr(known, key):
                near = difflib.get_close_matches(key, [name for name in vars(known) if not name.startswith("_")], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"model.config.{part}.{key}: {type(known).__name__} has no such option{hint}")
