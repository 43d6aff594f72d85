"""Any Hugging Face vision-language model: the building block of model plugins for those.

Text, packing, attention over documents and the output layer are those of `HuggingFaceModel`, on the text backbone. The
vision tower keeps its own attention; what it sees takes the places of placeholder tokens.

Whatever a model of transformers does with its images, its last act before the text is to call its decoder with
embeddings in which that has happened. So its own forward makes the inputs of its decoder, and is stopped where the
decoder begins (`decoder_inputs`); the packed row goes its own way from there.

Shape legend: R units of the row, U of this process's slice, N units of a forward, K places of what is seen, P units of
a prompt, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PretrainedConfig, PreTrainedTokenizerBase

from cosmos_core.errors import ConfigError, DataError, PluginIncompatibleError
from cosmos_core.models.huggingface import HuggingFaceModel
from cosmos_core.models.packing import EMBEDDINGS
from cosmos_core.models.parallel.collectives import split_dim
from cosmos_core.models.parallel.stages import leading_problems
from cosmos_core.models.tokenizer import FILE as TOKENIZER_FILE
from cosmos_core.models.tokenizer import tokenizer_defaults
from cosmos_core.models.tokens import token_array
from cosmos_core.models.weights import loading
from cosmos_core.protocols import Layout, ModelFacts
from cosmos_core.protocols.vision import Conditioning, Shown, VisionInputs
from cosmos_core.types import Payload

if TYPE_CHECKING:
    import torch.distributed as dist


MASK: Final = "visual_pos_masks"
DEEPER: Final = "deepstack_visual_embeds"
_OURS: Final = {EMBEDDINGS, "input_ids", "position_ids", "attention_mask"} | {
    *("past_key_values", "cache_position", "use_cache", "return_dict")
}
"""What decoders are called with that rows have their own of, or none."""


@attrs.frozen(kw_only=True, eq=False)
class DecoderInputs:
    """Embeddings of a whole row, of tokens and of what is seen, as a text decoder is called with them.

    At `places_K`, int64, each of `deeper_KD` is added behind one of its first layers (deepstack; arXiv 2406.04334).
    """

    embeddings_RD: torch.Tensor
    places_K: torch.Tensor
    deeper_KD: tuple[torch.Tensor, ...] = ()

    def part(self, bounds: tuple[int, int], sequence_group: dist.ProcessGroup | None) -> dict[str, Any]:
        """Keyword arguments of the decoder for this process's slice; `sequence_group` may split it between layers."""
        start, stop = bounds
        entered_UD = self.embeddings_RD[start:stop]
        if not self.deeper_KD:
            return {EMBEDDINGS: entered_UD[None]}
        here_k = ((self.places_K >= start) & (self.places_K < stop)).nonzero()[:, 0]
        places_k = self.places_K[here_k] - start
        deeper_kD = [feature[here_k].to(entered_UD.dtype) for feature in self.deeper_KD]
        is_seen_U = torch.zeros(len(entered_UD), dtype=torch.bool, device=entered_UD.device)
        is_seen_U[places_k] = True
        if sequence_group is not None:
            # Each process adds to its part of the sequence; the gradient of the tower is gathered from all parts.
            spread_UD = [torch.zeros_like(entered_UD).index_copy(0, places_k, deeper) for deeper in deeper_kD]
            deeper_kD = [split_dim(deeper, 0, sequence_group) for deeper in spread_UD]
            is_seen_U = torch.ones(len(deeper_kD[0]), dtype=torch.bool, device=entered_UD.device)
        return {EMBEDDINGS: entered_UD[None], MASK: is_seen_U[None], DEEPER: deeper_kD}


def decoder_inputs(
    module: Any,
    tokens_R: torch.Tensor,
    told_R: torch.Tensor,
    positions_R: torch.Tensor,
    media: Mapping[str, torch.Tensor],
) -> DecoderInputs:
    """Run a model, or its first stage, up to its text decoder.

    Args:
        module: The model.
        tokens_R: int64, which it embeds.
        told_R: int64, in which it looks for places: another token for each placeholder that stands for nothing, such as
            a sampled one.
        positions_R: int64 [..., R].
        media: What the model's forward takes of images, for all documents of the row.

    Raises:
        PluginIncompatibleError: It hands its decoder what the rest of a row would not carry along.
    """
    dtype = next(module.parameters()).dtype
    given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in media.items()}
    reached: dict[str, Any] = {}

    def restore(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids_1R, *others = args
        return (torch.where(told_R != tokens_R, tokens_R, ids_1R), *others)

    def stop(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not args, "transformers calls decoders by keyword"
        reached.update(kwargs)
        raise _Reached

    with (
        module.get_input_embeddings().register_forward_pre_hook(restore),
        module.get_decoder().register_forward_pre_hook(stop, with_kwargs=True),
        contextlib.suppress(_Reached),
    ):
        module.base_model(input_ids=told_R[None], position_ids=positions_R.unsqueeze(-2), use_cache=False, **given)
    taken = {key: value for key, value in reached.items() if value is not None and value is not False}
    if beyond := sorted(taken.keys() - _OURS - {MASK, DEEPER}):
        raise PluginIncompatibleError(
            f"{type(module).__name__} hands its text decoder {', '.join(beyond)} beside embeddings, which a packed row "
            "does not carry along; images need a model plugin of its own"
        )
    embeddings_RD, mask_1R = taken[EMBEDDINGS][0], taken.get(MASK)
    places_K = torch.zeros(0, dtype=torch.int64) if mask_1R is None else mask_1R[0].nonzero()[:, 0]
    return DecoderInputs(embeddings_RD=embeddings_RD, places_K=places_K, deeper_KD=tuple(taken.get(DEEPER) or ()))


class _Reached(Exception):  # noqa: N818 - no error: the way out
    """The decoder was called."""


_LAYER: Final = "deeper_"
_NEXT: Final = (0, 0)
"""Of two generated units the first goes through the forward: its position is where generation starts."""


class VisionLanguageModel(HuggingFaceModel):
    """A vision-language model of transformers, with a `text_config` and a text backbone of its own.

    Engines that run a module themselves are handed what training computes (`protocols.vision.VisionModel`): `pack`
    lays a prompt out, `embed` runs the towers. A family says which arrays of a prompt it reads (`is_media`); one whose
    `embed` gives its backbone other things than transformers' decoders take overrides `per_unit` and `keywords`.
    """

    auto_class: ClassVar[Any] = AutoModelForImageTextToText
    takes_rows_of_one: ClassVar[bool] = False

    @property
    def shown(self) -> Callable[[Payload], Sequence[Shown]] | None:
        """None: a family whose other implementations take what its prompts show overrides it with a method."""
        return None

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
            problems = leading_problems(
                self.config.model_type,
                self._num_deep,
                self.config.get_text_config().num_hidden_layers,
                num_stages=layout.mesh.size("pp") * layout.stages_per_rank,
                is_split=layout.sequence_parallel and layout.mesh.size("tp") > 1,
            )
            for problem in problems:
                raise ConfigError(problem)
        return super().build(seed=seed, dtype=dtype, device=device, layout=layout)

    def backbone(self, module: torch.nn.Module) -> torch.nn.Module:
        """The text backbone: what is seen has become embeddings by then (`embed`)."""
        text: torch.nn.Module = module.get_decoder()  # type: ignore[operator]
        return text

    def condition(self, prompt: Payload) -> Conditioning | None:
        """Lay out a prompt that shows something (see `cosmos_core.protocols.vision.VisionModel`)."""
        more = prompt.arrays.keys() - {"prompt"}
        if foreign := sorted(name for name in more if not self.is_media(name)):
            raise DataError(f"{type(self).__name__} has no use for the prompt's {', '.join(foreign)}")
        if not more:
            return None
        payload = attrs.evolve(prompt, arrays={**prompt.arrays, "completion": token_array(_NEXT)})
        (batch,) = self.pack([payload], budget=prompt.arrays["prompt"].shape[0] + 1)
        positions = batch.inputs["positions"]
        return Conditioning(positions=positions[..., :-1], next_position=int(positions[..., -1].max()), batch=batch)

    def is_media(self, name: str) -> bool:  # noqa: ARG002 - what an override reads
        """Tell whether an array of this name is of what a prompt shows; none is by default."""
        return False

    def enter(self, module: torch.nn.Module, conditioning: Conditioning) -> Mapping[str, torch.Tensor]:
        """Embeddings of each unit of a prompt, and what deeper layers add: [P, ...] each."""
        entry = self.embed(module, self._row(module, conditioning.batch))
        num_units = conditioning.positions.shape[-1]
        return {name: tensor[:num_units] for name, tensor in self.per_unit(entry).items()}

    def evaluate(self, module: torch.nn.Module, inputs: VisionInputs) -> torch.Tensor:
        """Logits [R, V], before the temperature."""
        embeddings_ND: torch.Tensor = module.get_input_embeddings()(inputs.tokens_N)  # type: ignore[operator]
        entered_ND = embeddings_ND.index_copy(0, inputs.places_K, inputs.features[EMBEDDINGS])
        output = self.backbone(module)(
            inputs_embeds=entered_ND[None],
            position_ids=inputs.positions.unsqueeze(-2),
            use_cache=False,
            **self.keywords(inputs),
        )
        return self.logits(module, output.last_hidden_state[0, inputs.kept_R])

    def per_unit(self, entry: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """The result of `embed` for a row of U units, as [U, ...] each: embeddings, and what deeper layers add.

        Raises:
            PluginIncompatibleError: The family gives its backbone something else, too.
        """
        if foreign := entry.keys() - {EMBEDDINGS, MASK, DEEPER}:
            raise PluginIncompatibleError(
                f"{type(self).__name__} gives its backbone {', '.join(sorted(foreign))} besides embeddings: it must "
                "override per_unit and keywords for engines to generate from media"
            )
        units = {EMBEDDINGS: entry[EMBEDDINGS][0]}
        for number, deeper_KD in enumerate(entry.get(DEEPER, ())):
            # Text adds nothing.
            spread_UD = torch.zeros_like(units[EMBEDDINGS])
            spread_UD[entry[MASK][0]] = deeper_KD
            units[f"{_LAYER}{number}"] = spread_UD
        return units

    def keywords(self, inputs: VisionInputs) -> Mapping[str, Any]:
        """Arguments of the backbone besides embeddings and positions: what deeper layers add."""
        deeper_KD = [rows for name, rows in inputs.features.items() if name.startswith(_LAYER)]
        if not deeper_KD:
            return {}
        is_shown_N = torch.zeros_like(inputs.tokens_N, dtype=torch.bool)
        is_shown_N[inputs.places_K] = True
        return {MASK: is_shown_N[None], DEEPER: deeper_KD}

    def find_config(self) -> PretrainedConfig:
        """The config; beside a tokenizer made locally, special tokens have the ids that it gave them."""
        config = super().find_config()
        if self.context.path is not None and (self.context.assets / TOKENIZER_FILE).is_file():
            for token, name in self.special_tokens.items():
                if name is not None:
                    setattr(config, name, self.tokenizer.convert_tokens_to_ids(token))
        return config

    def resolved_config(self, config: Mapping[str, Any], made: PreTrainedTokenizerBase) -> PretrainedConfig:
        """A recipe's config; what it leaves to the tokenizer stands in its `text_config`."""
        # Of a type that transformers does not know all is told when the config is made.
        if (model_type := config.get("model_type")) in CONFIG_MAPPING:
            whole = CONFIG_MAPPING[model_type]
            for part in whole.sub_configs:
                # transformers would carry unknown keys along unread.
                given = config.get(part) or {}
                named = given.get("model_type")
                known = CONFIG_MAPPING[named]() if named in CONFIG_MAPPING else getattr(whole(), part)
                loading.refuse_unknown(given, known, f"model.config.{part}")
        ids = {name: made.convert_tokens_to_ids(token) for token, name in self.special_tokens.items() if name}
        text = {**tokenizer_defaults(made), **dict(config.get("text_config") or {})}
        resolved: PretrainedConfig = loading.config_from_mapping({**ids, **config, "text_config": text})
        return resolved

    @property
    def _num_deep(self) -> int:
        """First layers to whose results what is seen is added (deepstack; arXiv 2406.04334)."""
        return len(getattr(getattr(self.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
