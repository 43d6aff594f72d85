"""What a Hugging Face model is, as far as its config and tokenizer say it: known without weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from cosmos_core.errors import ConfigError
from cosmos_core.models import facts, head
from cosmos_core.models.encoding import HuggingFaceOptions, TextEncoding
from cosmos_core.models.parallel import anatomy
from cosmos_core.models.parallel.float8 import candidates
from cosmos_core.models.tokenizer import build_tokenizer
from cosmos_core.models.weights import loading
from cosmos_core.models.weights.loading import absence, holds_weights
from cosmos_core.models.weights.streaming import Streamed
from cosmos_core.protocols import ModelContext, ModelFacts

CONFIG_FILE = "config.json"


class Architecture(TextEncoding, ABC):
    """A model's config and facts.

    Attributes:
        model_types: Values of the config's `model_type` that this class is for; None takes any.
        auto_class: The class of transformers that makes modules of configs and checkpoints.
    """

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    model_types: ClassVar[frozenset[str] | None] = None

    def __init__(self, options: HuggingFaceOptions, context: ModelContext) -> None:
        super().__init__(options, context)
        self._config: PretrainedConfig | None = None
        self._facts: ModelFacts | None = None

    @property
    def config(self) -> PretrainedConfig:
        """The Hugging Face config: of the checkpoint, else the recipe's, as resolved by `prepare`.

        Raises:
            ConfigError: There is none, it is unusable, or of another family.
        """
        if self._config is None:
            config = self._find_config()
            if self.model_types is not None and config.model_type not in self.model_types:
                allowed = ", ".join(sorted(self.model_types))
                raise ConfigError(
                    f"model: model_type {config.model_type!r} is not one of this plugin's: {allowed}; "
                    "model.plugin = 'hf' takes any family"
                )
            self._config = config
        return self._config

    @property
    def _trusts_model_code(self) -> bool:
        """Whether a model in the checkpoint's own code may be taken: not where the family is one of transformers'."""
        is_known = self.model_types is not None and self.model_types <= CONFIG_MAPPING_NAMES.keys()
        return self.context.trust_remote_code and not is_known

    def facts(self) -> ModelFacts:
        """Describe the model without building weights; those of a checkpoint on this machine are looked through.

        Raises:
            CosmosError: The config makes no model, or the checkpoint is missing files, truncated or of another model.
        """
        if self._facts is None:
            self._facts = self._find_facts()
        return self._facts

    def _find_facts(self) -> ModelFacts:
        shell = facts.make_shell(
            self.config,
            self.auto_class,
            trust_remote_code=self._trusts_model_code,
        )
        absent = self._look_through(shell)
        overrides: Mapping[str, str] = getattr(self, "tensor_plan", {})
        num_parameters = sum(parameter.numel() for parameter in shell.parameters())
        extents = facts.extents_of(shell, overrides)
        impossible, num_tied = facts.impossible_axes(shell), anatomy.num_tied(shell)
        text = self.config.get_text_config()
        ids = self.tokenizer.get_vocab().values()
        return ModelFacts(
            architecture=type(shell).__name__,
            num_parameters=num_parameters,
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            tokenizer_size=max(ids, default=-1) + 1,
            context_length=getattr(text, "max_position_embeddings", None) or 1 << 20,
            stop_ids=self.stop_ids(),
            pad_id=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.stop_id(),
            cache_size=facts.cache_values(text),
            head_size=facts.head_size(text),
            num_tied_parameters=num_tied,
            extents=extents,
            impossible=impossible,
            most_outputs=head.CHUNK_ELEMENTS,
            absent_weights=absent,
            linear_layers=frozenset(candidates(shell)),
            matrices=facts.matrices_of(shell),
            column_split=facts.column_split(shell, overrides),
            # Last: the shell is of no use afterwards.
            parts=facts.parts_and_kept(shell, self._forward_of_text, overrides),
        )

    def _look_through(self, shell: PreTrainedModel) -> str:
        """Look through a checkpoint on this machine; of a folder with a config alone, what is said of it."""
        folder = None if self.context.path is None else Path(self.context.path)
        if folder is None or not folder.is_dir():
            return ""
        if not holds_weights(folder):
            return absence(folder)
        Streamed(str(folder), shell)
        return ""

    def prepare(self, corpus: Iterable[str], tokenizer: Mapping[str, Any]) -> None:
        """Train the tokenizer into `context.assets`, and write the resolved config beside it.

        A recipe's config without `vocab_size` or special token ids takes those of the tokenizer.

        Raises:
            ConfigError: `tokenizer` asks for what cannot be made.
        """
        assets = self.context.assets
        assets.mkdir(parents=True, exist_ok=True)
        made = build_tokenizer(corpus, tokenizer)
        made.save_pretrained(assets)
        if self.context.config is not None:
            defaults = {
                "vocab_size": len(made),
                "pad_token_id": made.pad_token_id,
                "bos_token_id": made.bos_token_id,
                "eos_token_id": made.eos_token_id,
            }
            loading.config_from_mapping({**defaults, **self.context.config}).save_pretrained(assets)
        self._config = self._tokenizer = self._facts = None

    def _find_config(self) -> PretrainedConfig:
        trust = self._trusts_model_code
        if self.context.path is not None:
            return loading.config_from_checkpoint(self.context.path, trust_remote_code=trust)
        if (self.context.assets / CONFIG_FILE).is_file():
            return loading.config_from_checkpoint(str(self.context.assets), trust_remote_code=trust)
        if self.context.config is None:
            raise ConfigError("model: give path (a checkpoint) or config (a Hugging Face config)")
        return loading.config_from_mapping(self.context.config)

    @abstractmethod
    def _forward_of_text(self, module: PreTrainedModel, num_units: int) -> Callable[[], object]:
        """A forward of so many units of text up to the output layer."""
