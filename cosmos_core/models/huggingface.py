"""Any Hugging Face causal language model: the generic plugin, and the building block of model plugins.

A plugin for a family subclasses `HuggingFaceModel`, sets its class variables, and overrides what the family does in
a way of its own: `encode`, `embed`, `backbone`, `hidden`, `logits`.

Shape legend: U units of this process's slice of a packed row, N decisions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import attrs
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from cosmos_core.errors import ConfigError, PluginIncompatibleError, UntriedError
from cosmos_core.models import facts, head
from cosmos_core.models.attention.packed import is_packed
from cosmos_core.models.building import Blueprint, build_part, build_whole, lay_out, make_shell
from cosmos_core.models.packing import Row, device_of, pack
from cosmos_core.models.parallel.forwards import layout_of, within
from cosmos_core.models.parallel.stages import stages_of
from cosmos_core.models.small import check_tiny_model, find_small, reason_not_to_pack, trial_payloads, verify
from cosmos_core.models.tokenizer import (
    FILE,
    GENERATION_FILE,
    HuggingFaceOptions,
    TextEncoder,
    build_tokenizer,
    load_tokenizer,
    tokenizer_defaults,
)
from cosmos_core.models.tokens import tokens_payload, values
from cosmos_core.models.weights import loading
from cosmos_core.models.weights.exporting import (
    ADAPTER,
    channel_of,
    export_adapters,
    export_parts,
    led,
    same_dtype,
    share_files,
)
from cosmos_core.models.weights.streaming import Streamed, absent_weights, folder_of
from cosmos_core.protocols import Decided, Layout, MicroBatch, ModelCapabilities, ModelContext, ModelFacts
from cosmos_core.protocols.frozen import Comparison, KLTarget
from cosmos_core.protocols.model import ReadTurn, Trial
from cosmos_core.types import Message, Payload, Prompt

CAPABILITIES: Final = ModelCapabilities(
    mesh_axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp"}),
    divergences=frozenset({"forward-kl", "reverse-kl", "jsd"}),
    features=True,
)
"""Those of every `HuggingFaceModel`; of one with experts `MIXTURE_CAPABILITIES`."""
MIXTURE_CAPABILITIES: Final = attrs.evolve(CAPABILITIES, mesh_axes=CAPABILITIES.mesh_axes | {"ep"})
CONFIG_FILE: Final = "config.json"
_DOCUMENT_UNITS: Final = 32


class HuggingFaceModel:
    """A causal language model of transformers (see `cosmos_core.protocols.Model`).

    Attributes:
        auto_class: The class of transformers that makes modules of configs and checkpoints.
        model_types: Values of the config's `model_type` that this class is for; None takes any.
        special_tokens: What a tokenizer made locally has to know besides the usual, for each the name under which the
            config keeps its id, or None.
        tensor_plan: Overrides of how `tp` splits modules (see `parallel.plan.plan_for`).
        turn_end: The token that ends a turn of a chat; None, or not in the vocabulary: the end-of-text token does.
        stop_tokens: Tokens that end a completion besides the tokenizer's and the checkpoint's own.
        takes_rows_of_one: Whether documents that cannot be packed may be rows of their own.
        turn_template: The Jinja chat template of a tokenizer that has none: one made locally, or that knows `turn_end`.
        text: Encodes prompts, demonstrations and observations.
    """

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    model_types: ClassVar[frozenset[str] | None] = None
    special_tokens: ClassVar[Mapping[str, str | None]] = {}
    tensor_plan: ClassVar[Mapping[str, str]] = {}
    turn_end: ClassVar[str | None] = None
    stop_tokens: ClassVar[tuple[str, ...]] = ()
    turn_template: ClassVar[str | None] = None
    takes_rows_of_one: ClassVar[bool] = True

    def __init__(self, options: HuggingFaceOptions, context: ModelContext) -> None:
        self.options = options
        self.context = context
        self.text = self.make_text_encoder()

    def make_text_encoder(self) -> TextEncoder:
        """Make the encoder of texts; a family whose processor writes chats has one of its own."""
        return TextEncoder(self)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer from its files, with the chat template of the recipe, else its own, else the family's.

        A family may refuse one that is not its own.

        Raises:
            DataError: There is none, or it cannot be read.
        """
        context, options = self.context, self.options
        tokenizer = load_tokenizer(context.assets, context.path, trust_remote_code=context.trust_remote_code)
        if options.chat_template is not None:
            tokenizer.chat_template = options.chat_template
        elif tokenizer.chat_template is None and (
            (context.assets / FILE).is_file() or self.turn_end in tokenizer.get_vocab()
        ):
            tokenizer.chat_template = self.turn_template
        return tokenizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer (see `load_tokenizer`)."""
        return self.text.tokenizer

    @cached_property
    def config(self) -> PretrainedConfig:
        """The Hugging Face config: of the checkpoint, else the recipe's, as resolved by `prepare`."""
        config = self.find_config()
        if self.model_types is not None and config.model_type not in self.model_types:
            allowed = ", ".join(sorted(self.model_types))
            raise ConfigError(
                f"model: model_type {config.model_type!r} is not one of this plugin's: {allowed}; "
                "model.plugin = 'hf' takes any family"
            )
        return config

    def find_config(self) -> PretrainedConfig:
        """Read the config, whatever its family; a family may complete it.

        Raises:
            ConfigError: There is none, or it is unusable.
        """
        path, made = self.context.path, self.context.assets
        path = str(made) if path is None and (made / CONFIG_FILE).is_file() else path
        if path is not None:
            return loading.config_from_checkpoint(path, trust_remote_code=self._trusts_model_code)
        if self.context.config is None:
            raise ConfigError("model: give path (a checkpoint) or config (a Hugging Face config)")
        return loading.config_from_mapping(self.context.config)

    @property
    def _trusts_model_code(self) -> bool:
        """Tell whether a checkpoint's own code may make the model: not where the family is one of transformers'."""
        is_known = self.model_types is not None and self.model_types <= CONFIG_MAPPING_NAMES.keys()
        return self.context.trust_remote_code and not is_known

    def facts(self) -> ModelFacts:
        """Describe the model without building weights; those of a checkpoint on this machine are looked through."""
        return self._facts

    @cached_property
    def _facts(self) -> ModelFacts:
        shell = self._shell()
        absent = absent_weights(self.context.path, shell)
        return facts.describe(
            shell, self.tensor_plan, self.text, absent, self._forward_of_text, alone_because=self.alone_because
        )

    @cached_property
    def alone_because(self) -> str:
        """The reason why each document is a row of its own, slow as that is; empty where documents are packed.

        A family of models that a plugin is for packs. Of any other a small model of its make is tried.

        Raises:
            PluginIncompatibleError: It does not give what transformers' own forward gives either way.
        """
        if self.model_types is not None:
            return ""
        reason = reason_not_to_pack(self._draft(is_packed=True), self.verify)
        if reason and not self.takes_rows_of_one:
            raise PluginIncompatibleError(f"{self.config.model_type}: its documents cannot be packed: {reason}")
        return reason

    def trial(self, *, num_layers: int) -> Trial | None:
        """Make a small model to be tried in layouts (see `protocols.model.TriedModel`).

        None for a family that the plugin is for.

        Raises:
            UntriedError: No small one can be made, or the checkpoint's own code makes it, which other processes lack.
        """
        if self.model_types is not None:
            return None
        own = getattr(self.config, "auto_map", None) or {}
        if self._trusts_model_code and self.auto_class.__name__ in own:
            raise UntriedError("the checkpoint's own code makes it (model.trust_remote_code)")
        config = find_small(attrs.evolve(self._blueprint(), path=None), self.verify, num_layers=num_layers)
        payloads = trial_payloads(config.get_text_config().vocab_size)
        return Trial(make=functools.partial(_small_model, type(self), self.options, config), payloads=payloads)

    def prepare(self, corpus: Iterable[str], tokenizer: Mapping[str, Any]) -> None:
        """Train the tokenizer into `context.assets`, and write the resolved config beside it.

        A recipe's config without `vocab_size` or special token ids takes those of the tokenizer.
        """
        assets = self.context.assets
        assets.mkdir(parents=True, exist_ok=True)
        made = build_tokenizer(corpus, tokenizer)
        if self.special_tokens:
            made.add_special_tokens({"additional_special_tokens": list(self.special_tokens)})
        made.save_pretrained(assets)
        if self.context.config is not None:
            self.resolved_config(self.context.config, made).save_pretrained(assets)
        self.text.forget()
        for name in ("config", "_facts", "alone_because"):
            self.__dict__.pop(name, None)

    def resolved_config(self, config: Mapping[str, Any], made: PreTrainedTokenizerBase) -> PretrainedConfig:
        """A recipe's config, with what it leaves to a tokenizer that was made for it."""
        resolved: PretrainedConfig = loading.config_from_mapping({**tokenizer_defaults(made), **config})
        return resolved

    def encode(self, prompt: Prompt) -> Payload:
        """Text as it is, turns of a chat through the template, up to where the model answers."""
        return tokens_payload(self.text.prompt_ids(prompt))

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """The prompt, its demonstration and the token that ends it (a chat's: the turn's end)."""
        completion = self.text.demonstration_ids(prompt)
        return tokens_payload(self.text.prompt_ids(prompt), completion)

    def decode(self, payload: Payload) -> str:
        """The completion as text, special tokens left out."""
        return str(self.tokenizer.decode(values(payload, "completion").tolist(), skip_special_tokens=True))

    def prompt_text(self, payload: Payload) -> str:
        """The prompt of a payload as text, special tokens in it."""
        return str(self.tokenizer.decode(values(payload, "prompt").tolist()))

    def encode_turns(self, prompt: Prompt, written: Sequence[int], turns: Sequence[Message]) -> list[int]:
        """Encode what others say after a turn of the model (see `TextEncoder.turns_ids`)."""
        return self.text.turns_ids(prompt, written, turns)

    def read_turn(self, prompt: Prompt, ids: Sequence[int]) -> ReadTurn:
        """Read a turn of the model (see `TextEncoder.read_turn`)."""
        return self.text.read_turn(prompt, ids)

    def build(
        self, *, seed: int, dtype: torch.dtype, device: torch.device, layout: Layout | None = None
    ) -> torch.nn.Module:
        """Make the module, in evaluation mode (no dropout), checked once against transformers' own forward.

        Of a model that is spread over processes a small one of the same make is checked: transformers' own forward
        needs all of it in one place. On the meta device a process's part has its shapes alone, and nothing is checked.

        Raises:
            CosmosError: A checkpoint is missing, truncated or of another architecture, or the model gives something
                else than transformers' own forward, or cannot be spread like this.
        """
        blueprint = self._blueprint(seed=seed, dtype=dtype, device=device)
        if layout is not None and layout.mesh.world_size > 1:
            if device.type != "meta":
                check_tiny_model(blueprint, self.verify)
            return build_part(blueprint, layout)
        whole = build_whole(blueprint)
        self.verify(whole)
        module: torch.nn.Module = whole
        if layout is not None:
            lay_out(whole, blueprint, layout)
        return module

    def verify(self, module: PreTrainedModel) -> None:
        """Compare documents, packed if they can be, with transformers' own forward of each."""
        verify(module, self._packed_logits)

    def pack(
        self, payloads: Sequence[Payload], *, budget: int, multiple: int = 1, is_uniform: bool = False
    ) -> list[MicroBatch]:
        """Pack payloads into micro-batches of at most `budget` units, before padding (see `packing.pack`)."""
        is_alone = bool(self.alone_because)
        return pack(payloads, budget=budget, multiple=multiple, is_uniform=is_uniform, is_alone=is_alone)

    def decide(self, module: torch.nn.Module, batch: MicroBatch, **asked: Any) -> Decided:
        """Log-probabilities of the completion tokens; only their places pass through the output layer."""
        return self.conclude(module, batch, None, **asked)

    def stages(self, module: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """The stages that this process holds, in the order of the model."""
        return stages_of(module)

    def advance(self, stage: torch.nn.Module, batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [U, D] of this process's slice of the row, as the next stage receives them."""
        row = self._row(stage, batch)
        return within(stage, lambda: self.hidden(stage, row, received))

    def conclude(
        self,
        stage: torch.nn.Module,
        batch: MicroBatch,
        received: torch.Tensor | None,
        *,
        temperature: float,
        with_entropy: bool = False,
        prediction_for: Comparison | None = None,
        kl_target: KLTarget | None = None,
        with_features: bool = False,
    ) -> Decided:
        """Run the last stage (see `decide`)."""
        row = self._row(stage, batch)
        specs: list[TreeSpec] = []

        def body() -> tuple[Any, ...]:
            hidden_ND = self.hidden(stage, row, received).index_select(0, row.decisions_n)
            decided = head.evaluate(
                lambda each_ND: self.logits(stage, each_ND),
                hidden_ND,
                row.targets_n,
                vocabulary=head.vocabulary_of(stage),
                temperature=temperature,
                with_entropy=with_entropy,
                prediction_for=None if prediction_for is None else head.divergence_of(prediction_for),
                kl_target=head.sliced(kl_target, row.own),
                output=stage.get_output_embeddings(),  # type: ignore[operator]
            )
            leaves, spec = tree_flatten(attrs.evolve(decided, features_ND=hidden_ND if with_features else None))
            specs[:] = [spec]
            # FSDP finds tensors in plain containers only.
            return tuple(leaves)

        leaves = within(stage, body)
        whole: Decided = tree_unflatten([None if each is None else row.whole(each) for each in leaves], specs[0])
        return whole

    def hidden(self, module: torch.nn.Module, row: Row, received: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [U, D] of this process's slice of the row: of a last stage, as they enter the output layer.

        `received` are those [U, D] of the stage before; None for a first stage.
        """
        entry = self.embed(module, row) if received is None else {"inputs_embeds": received[None]}
        backbone, positions = self.backbone(module), row.positions_U.unsqueeze(-2)
        keywords: dict[str, Any] = {"position_ids": positions, "packing": row.packing}
        if not is_packed(module):
            # Models that know no positions count them, if at all, themselves.
            takes_positions = "position_ids" in inspect.signature(backbone.forward).parameters
            keywords = {"position_ids": positions} if takes_positions else {}
        output = backbone(**entry, **self.layer_keywords(row), **keywords, use_cache=False)
        hidden_UD: torch.Tensor = output.last_hidden_state[0]
        return hidden_UD

    def embed(self, module: torch.nn.Module, row: Row) -> dict[str, Any]:  # noqa: ARG002 - overrides need it
        """Keyword arguments of a first stage's backbone, for this process's slice only.

        `input_ids`, or `inputs_embeds` where more than text comes in; media are among `row.inputs`, whole.
        """
        return {"input_ids": row.tokens_U[None]}

    def layer_keywords(self, row: Row) -> Mapping[str, Any]:  # noqa: ARG002 - what an override reads
        """Arguments of every layer besides the row's packing, for hooks of a family; none by default."""
        return {}

    def backbone(self, module: torch.nn.Module) -> torch.nn.Module:
        """The part of the module that gives hidden states of text."""
        base: torch.nn.Module = module.base_model  # type: ignore[assignment]
        if base is not module:
            return base
        # Some text models of a family that sees do not know the name of their own base.
        embedding = module.get_input_embeddings()  # type: ignore[operator]
        return next(child for child in module.children() if any(each is embedding for each in child.modules()))

    def logits(self, module: torch.nn.Module, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states, before the temperature."""
        return head.plain_logits(module, hidden_ND)

    def export(
        self, module: torch.nn.Module, directory: Path, *, dtype: torch.dtype | None = None
    ) -> Sequence[torch.dtype]:
        """Write safetensors, config and tokenizer: `AutoModelForCausalLM.from_pretrained` reads them.

        Adapters are added to the weights, and written beside them in peft's format, too, in their own dtype if none is
        given. What transformers keeps in float32, such as the balance of a router, stays so in any dtype.

        Every process that holds a part of the module calls it; what several hold is gathered tensor by tensor.

        Raises:
            CheckpointError: It cannot be written, or has values beyond the dtype; every process says so.
        """
        shell, path, channel = self._shell(), self.context.path, channel_of(self.stages(module)[0])

        def take_generation_config() -> None:
            if path is not None and ((folder := folder_of(path)) / GENERATION_FILE).is_file():
                shell.generation_config = GenerationConfig.from_pretrained(folder)

        led(channel, directory, take_generation_config)
        written = export_parts(module, shell, directory, channel, dtypes=self._exported_dtypes(shell, dtype))
        export_adapters(module, directory / ADAPTER, channel, below=path, dtype=dtype)
        led(channel, directory, lambda: self.write_companions(directory))
        return written

    def write_companions(self, directory: Path) -> None:
        """Write what goes with weights."""
        self.tokenizer.save_pretrained(directory)
        share_files(directory)

    def _exported_dtypes(self, shell: PreTrainedModel, dtype: torch.dtype | None) -> Mapping[str, torch.dtype]:
        """The dtypes of an export: the one asked for, else the checkpoint's, else the config's; empty: the module's."""
        if dtype is None and self.context.path is not None:
            return Streamed(self.context.path, shell).dtypes
        dtype = dtype or self.config.dtype
        if dtype is None:
            return {}
        return same_dtype(dtype, shell.state_dict(), shell._get_dtype_plan(dtype))  # noqa: SLF001 - as transformers

    def _packed_logits(self, module: torch.nn.Module, tokens_U: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        return self.logits(module, self.hidden(module, self._row(module, self._text_batch(tokens_U, lengths))))

    def _text_batch(self, tokens_U: torch.Tensor, lengths: Sequence[int]) -> MicroBatch:
        """Documents of text that decide nothing."""
        none = torch.zeros(0, dtype=torch.int64)
        return MicroBatch(
            sequences=(),
            num_decisions=(),
            num_units=len(tokens_U),
            inputs={
                "tokens": tokens_U,
                "positions": self.text_positions(lengths),
                "lengths": torch.tensor(lengths),
                "decisions": none,
                "targets": none,
            },
        )

    def _forward_of_text(self, module: PreTrainedModel, num_units: int) -> Callable[[], object]:
        """A forward up to the output layer, for planning.

        Its documents are short: some attention keeps its scores on a CPU, and on an accelerator none does.
        """
        lengths = [_DOCUMENT_UNITS] * (num_units // _DOCUMENT_UNITS)
        batch = self._text_batch(torch.zeros(num_units, dtype=torch.int64), lengths)
        row = Row.of(batch, torch.device("cpu"), None)
        return lambda: self.hidden(module, row)

    def text_positions(self, lengths: Sequence[int]) -> torch.Tensor:
        """int64 [..., U], the positions of documents of text of these lengths."""
        return torch.cat([torch.arange(length) for length in lengths])

    def _blueprint(self, **how: Any) -> Blueprint:
        """The model that is to be built; `how` are seed, dtype and device, if they matter."""
        return self._draft(**how, is_packed=not self.alone_because)

    def _draft(self, **how: Any) -> Blueprint:
        return Blueprint(
            config=self.config,
            path=self.context.path,
            trust_remote_code=self._trusts_model_code,
            auto_class=self.auto_class,
            tensor_plan=self.tensor_plan,
            **how,
        )

    def _shell(self) -> PreTrainedModel:
        return make_shell(self._blueprint(device=torch.device("meta")))

    def _row(self, module: torch.nn.Module, batch: MicroBatch) -> Row:
        return Row.of(batch, device_of(module), layout_of(module))


def _small_model(
    kind: type[HuggingFaceModel], options: HuggingFaceOptions, config: PretrainedConfig
) -> HuggingFaceModel:
    model = kind(options, ModelContext(path=None, config=None, assets=Path()))
    # Some configs that were made smaller cannot be written down and read again.
    model.__dict__["config"] = config
    return model
