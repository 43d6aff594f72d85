"""Any Hugging Face causal language model: the generic plugin, and the building block of model plugins.

A plugin for a family subclasses `HuggingFaceModel`, sets its class variables, and overrides what the family does in
a way of its own: `encode`, `hidden`, `logits`.

Shape legend: U units of a packed row, N decisions of it, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.policy.modeling import head, loading
from cosmos_core.policy.modeling.attention import Packing
from cosmos_core.policy.modeling.packing import pack
from cosmos_core.policy.modeling.tokenizer import build_tokenizer, load_tokenizer
from cosmos_core.policy.modeling.tokens import tokens_payload, values
from cosmos_core.policy.modeling.verification import verify_packing
from cosmos_core.protocols import Decided, MicroBatch, ModelContext, ModelFacts
from cosmos_core.types import JSON, Payload, Prompt

CONFIG_FILE = "config.json"


@attrs.frozen(kw_only=True)
class HuggingFaceOptions:
    """How prompts become tokens."""

    add_special_tokens: bool = option(
        True, help="Whether the tokenizer adds its special tokens (a beginning-of-text token) to plain text prompts."
    )
    chat_template: str | None = option(None, help="A Jinja chat template to use instead of the tokenizer's.")
    chat_template_options: Mapping[str, JSON] = option(
        factory=dict, help="Extra variables of the chat template, such as `enable_thinking = false`."
    )


class HuggingFaceModel:
    """A causal language model of transformers (see `cosmos_core.protocols.Model`).

    Attributes:
        model_types: Values of the config's `model_type` that this class is for; None takes any.
        turn_end: The token that ends a turn of a chat; None, or not in the vocabulary: the end-of-text token does.
        stop_tokens: Tokens that end a completion besides the tokenizer's and the checkpoint's own.
        turn_template: The Jinja chat template of a tokenizer that has none: one made locally, or that knows `turn_end`.
    """

    model_types: ClassVar[frozenset[str] | None] = None
    turn_end: ClassVar[str | None] = None
    stop_tokens: ClassVar[tuple[str, ...]] = ()
    turn_template: ClassVar[str | None] = None

    def __init__(self, options: HuggingFaceOptions, context: ModelContext) -> None:
        self.options = options
        self.context = context
        self._config: PretrainedConfig | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

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
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            DataError: There is none, or it cannot be read.
        """
        if self._tokenizer is None:
            tokenizer = load_tokenizer(
                self.context.assets, self.context.path, trust_remote_code=self.context.trust_remote_code
            )
            if self.options.chat_template is not None:
                tokenizer.chat_template = self.options.chat_template
            elif tokenizer.chat_template is None and (
                self.context.path is None or self.turn_end in tokenizer.get_vocab()
            ):
                tokenizer.chat_template = self.turn_template
            self._tokenizer = tokenizer
        return self._tokenizer

    def facts(self) -> ModelFacts:
        """Describe the model without building weights."""
        architecture, num_parameters = loading.count_parameters(
            self.config, trust_remote_code=self.context.trust_remote_code
        )
        text = self.config.get_text_config()
        ids = self.tokenizer.get_vocab().values()
        return ModelFacts(
            architecture=architecture,
            num_parameters=num_parameters,
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            tokenizer_size=max(ids, default=-1) + 1,
            context_length=getattr(text, "max_position_embeddings", None) or 1 << 20,
            stop_ids=self._stop_ids(),
            pad_id=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self._stop_id(),
        )

    def build(self, *, seed: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """Make the module, in evaluation mode (no dropout), checked once against transformers' own forward.

        Raises:
            CosmosError: A checkpoint is missing, truncated or of another architecture, or the model cannot be packed.
        """
        trust = self.context.trust_remote_code
        if self.context.path is None:
            module = loading.build_random(self.config, seed=seed, trust_remote_code=trust)
        else:
            assert self.config is not None
            module = loading.load_pretrained(self.context.path, dtype=dtype, trust_remote_code=trust)
        module = module.to(device=device, dtype=dtype).eval()
        verify_packing(module, lambda tokens_U, lengths: self._packed_logits(module, tokens_U, lengths))
        return module

    def encode(self, prompt: Prompt) -> Payload:
        """Text as it is, turns of a chat through the template, up to where the model answers.

        Raises:
            DataError: The prompt cannot be encoded.
        """
        return tokens_payload(self._prompt_ids(prompt))

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """The prompt, its demonstration and the token that ends it (a chat's: the turn's end).

        Raises:
            DataError: The prompt has no demonstration, or cannot be encoded.
        """
        if prompt.demonstration is None:
            raise DataError("the row has no demonstration, and the algorithm learns from demonstrations")
        ids = self.tokenizer(prompt.demonstration, add_special_tokens=False)["input_ids"]
        end_id = None if isinstance(prompt.text, str) else self.tokenizer.get_vocab().get(self.turn_end or "")
        return tokens_payload(self._prompt_ids(prompt), [*ids, self._stop_id() if end_id is None else end_id])

    def decode(self, payload: Payload) -> str:
        """The completion as text, special tokens left out."""
        return str(self.tokenizer.decode(values(payload, "completion").tolist(), skip_special_tokens=True))

    def pack(self, payloads: Sequence[Payload], *, budget: int) -> list[MicroBatch]:
        """Pack payloads into micro-batches of at most `budget` units (see `packing.pack`)."""
        return pack(payloads, budget=budget)

    def decide(
        self, module: torch.nn.Module, batch: MicroBatch, *, temperature: float, with_entropy: bool = False
    ) -> Decided:
        """Log-probabilities of the completion tokens; only their places pass through the output layer."""
        device = next(module.parameters()).device
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.inputs.items()}
        packing = Packing.of(batch.inputs["lengths"].tolist(), device)
        hidden_UD = self.hidden(module, inputs["tokens"], inputs["positions"], packing)
        return head.evaluate(
            lambda hidden_ND: self.logits(module, hidden_ND),
            hidden_UD.index_select(0, inputs["decisions"]),
            inputs["targets"],
            vocab_size=self.config.get_text_config().vocab_size,
            temperature=temperature,
            with_entropy=with_entropy,
        )

    def hidden(
        self, module: torch.nn.Module, tokens_U: torch.Tensor, positions_U: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        """Hidden states [U, D] of a packed row, as they enter the output layer."""
        output = module.base_model(  # type: ignore[operator]
            input_ids=tokens_U[None], position_ids=positions_U[None], use_cache=False, packing=packing
        )
        hidden_UD: torch.Tensor = output.last_hidden_state[0]
        return hidden_UD

    def logits(self, module: torch.nn.Module, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states, before the temperature."""
        return head.plain_logits(module, hidden_ND)

    def export(self, module: torch.nn.Module, directory: Path) -> None:
        """Write safetensors, config and tokenizer: `AutoModelForCausalLM.from_pretrained` reads them."""
        assert isinstance(module, PreTrainedModel)
        module.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

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
        self._config = self._tokenizer = None

    def _find_config(self) -> PretrainedConfig:
        trust = self.context.trust_remote_code
        if self.context.path is not None:
            return loading.config_from_checkpoint(self.context.path, trust_remote_code=trust)
        if (self.context.assets / CONFIG_FILE).is_file():
            return loading.config_from_checkpoint(str(self.context.assets), trust_remote_code=trust)
        if self.context.config is None:
            raise ConfigError("model: give path (a checkpoint) or config (a Hugging Face config)")
        return loading.config_from_mapping(self.context.config)

    def _packed_logits(self, module: torch.nn.Module, tokens_U: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        positions_U = torch.cat([torch.arange(length) for length in lengths]).to(tokens_U.device)
        packing = Packing.of(lengths, tokens_U.device)
        return self.logits(module, self.hidden(module, tokens_U, positions_U, packing))

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt.text, str):
            encoded = self.tokenizer(prompt.text, add_special_tokens=self.options.add_special_tokens)
            ids: list[int] = encoded["input_ids"]
        else:
            ids = self._chat_ids(prompt)
        if not ids:
            raise DataError(f"the prompt {prompt.text!r} encodes to no tokens")
        return ids

    def _chat_ids(self, prompt: Prompt) -> list[int]:
        assert not isinstance(prompt.text, str)
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the prompt is a chat, and the tokenizer has no chat template; "
                "set model.options.chat_template or use plain text prompts"
            )
        turns = [{"role": turn.role, "content": turn.content} for turn in prompt.text]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **self.options.chat_template_options
            )
        except loading.TEMPLATE_ERRORS as error:
            raise DataError(f"the chat template fails on this prompt: {loading.first_line(error)}") from error
        # The template has written the special tokens itself.
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _stop_id(self) -> int:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError("the tokenizer has no end-of-text token, so nothing can end a completion")
        return int(eos)

    def _stop_ids(self) -> frozenset[int]:
        """The tokenizer's end token, the family's, and those of a checkpoint's generation config."""
        vocabulary = self.tokenizer.get_vocab()
        stops = {self._stop_id(), *(vocabulary[token] for token in self.stop_tokens if token in vocabulary)}
        path = self.context.path
        if path is not None and (Path(path) / "generation_config.json").is_file():
            listed = GenerationConfig.from_pretrained(path).eos_token_id
            stops.update([listed] if isinstance(listed, int) else listed or ())
        return frozenset(stops)
