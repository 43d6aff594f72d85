"""Any Hugging Face vision-language model: the building block of model plugins for those.

Text, packing, attention over documents and the output layer are those of `HuggingFaceModel`, on the text backbone. The
vision tower keeps its own attention; what it sees takes the places of placeholder tokens.

Shape legend: U units of a row, N units of a forward, K of them of conditioned prompts, P units of a prompt, D hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PretrainedConfig, PreTrainedTokenizerBase

from cosmos_core.errors import ConfigError, DataError, PluginIncompatibleError
from cosmos_core.models.huggingface import HuggingFaceModel
from cosmos_core.models.packing import EMBEDDINGS
from cosmos_core.models.parallel.stages import leading_problems
from cosmos_core.models.tokenizer import FILE as TOKENIZER_FILE
from cosmos_core.models.tokenizer import tokenizer_defaults
from cosmos_core.models.tokens import token_array
from cosmos_core.models.vision.decoder import DEEPER, MASK
from cosmos_core.models.weights import loading
from cosmos_core.protocols import Layout, ModelFacts
from cosmos_core.protocols.vision import Conditioning, Shown, VisionInputs
from cosmos_core.types import Payload

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
