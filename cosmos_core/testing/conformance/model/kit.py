"""The kit for models: what a test class sets and overrides, with the tests of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from cosmos_core.models.tokens import KIND
from cosmos_core.protocols import Decided, Kind, Model, ModelCapabilities, ModelContext
from cosmos_core.testing.conformance.model.building import BuildingTests
from cosmos_core.testing.conformance.model.decisions import DecisionTests
from cosmos_core.testing.conformance.model.denoising import DenoisingTests
from cosmos_core.testing.conformance.model.encoding import EncodingTests
from cosmos_core.testing.conformance.model.layouts import LayoutTests
from cosmos_core.testing.conformance.model.optional import OptionalTests
from cosmos_core.testing.conformance.model.packing import PackingTests
from cosmos_core.testing.conformance.model.subject import Subject, demonstrations, reference_decisions
from cosmos_core.testing.conformance.plugin import PluginConformance, fault
from cosmos_core.testing.layouts import PluginModel
from cosmos_core.types import JSON, Payload, Prompt

_ROWS = (
    ("Ann has 3 apples and buys 4 more. How many?", "3+4=7\n#### 7"),
    ("2+2=", "4"),
    ("Zoë zählt: 12, 13,", "14 😀"),
    ("How many?", "Twenty-one"),
    ("a", ""),
    ("One, two, three, four, five, six,", "seven, eight, nine, ten, eleven"),
)


class ModelConformance(
    BuildingTests,
    EncodingTests,
    PackingTests,
    DecisionTests,
    OptionalTests,
    DenoisingTests,
    LayoutTests,
    PluginConformance,
):
    """Tests that every model must pass, on a tiny one of its family.

    A language model needs `plugin` and `config` (or `path`):

        class TestLlama(ModelConformance):
            plugin = "llama"
            config = TINY

    A model of another kind of payload overrides `payloads`, `reference` and `load_exported` as well.

    Attributes:
        config: A Hugging Face config, as `[model.config]` of a recipe, for random weights. Take a few layers of width
            16 to 64 and a large `initializer_range` (0.2), so that mistakes show.
        path: A folder with a small checkpoint, instead of `config`.
        tokenizer: What `prepare` is asked to make, as `[model.tokenizer]` of a recipe; None asks for nothing.
        temperatures: At which log-probs and entropies are compared with the reference. Gradients are tested at the
            first that is not 1.
        tolerance: Largest difference of a log-prob or entropy in float32: absolute, and relative to its size.

    Fixtures to override:
        options: The plugin's options, as a recipe gives them.
        context: The `ModelContext`.
        prompts: Rows, of different lengths, with demonstrations.
        corpus: Texts that the tokenizer is trained on; those of `prompts`.
        payloads: What is packed and evaluated; the demonstrations of `prompts`, noised by a `WorldModel`. At
            least two, of different lengths, and one at least of each payload kind that is declared.
        steering: Texts of the tokens that end or begin turns or stand for something else than text, with their ids;
            those of a Hugging Face `tokenizer` of the model.

    Methods to override:
        reference(model, module, payloads, *, temperature): What each payload's decisions are, by other means; one
            `Decided` a payload, its entropy None where there is none to compare. The default exports the module,
            loads it with `transformers.AutoModelForCausalLM` in float32 and runs each sequence alone.
        load_exported(directory): The tensors of an exported folder by canonical name, as the family's public library
            reads them. The default is `AutoModelForCausalLM.from_pretrained`.
    """

    kind: ClassVar[Kind] = "model"
    config: ClassVar[Mapping[str, JSON] | None] = None
    path: ClassVar[str | None] = None
    tokenizer: ClassVar[Mapping[str, JSON] | None] = {
        "build": "byte-bpe",
        "vocab_size": 300,
        "split_digits": True,
        "corpus_rows": 100,
    }
    temperatures: ClassVar[Sequence[float]] = (1.0, 0.6, 1.7)
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture
    def prompts(self) -> Sequence[Prompt]:
        """Rows of different lengths, each with a demonstration."""
        return tuple(Prompt(text=text, demonstration=answer) for text, answer in _ROWS)

    @pytest.fixture
    def corpus(self, prompts: Sequence[Prompt]) -> Sequence[str]:
        """The texts that a tokenizer is trained on."""
        return tuple(f"{prompt.text}{prompt.demonstration or ''}" for prompt in prompts)

    @pytest.fixture
    def context(self, tmp_path: Path) -> ModelContext:
        """A model's context: `path` or `config`, and an empty folder for what is made locally."""
        if (self.config is None) == (self.path is None):
            fault(
                f"{type(self).__name__} names no model, or two: set config, a Hugging Face config of a few layers such "
                "as {'model_type': 'qwen3', 'hidden_size': 32, ...}, or path, the folder of a small checkpoint"
            )
        return ModelContext(path=self.path, config=self.config, assets=tmp_path / "assets")

    @pytest.fixture
    def model(self, make: Callable[..., Any], context: ModelContext, corpus: Sequence[str]) -> Model:
        """The plugin's model, as a replica makes it once planning has made the tokenizer."""
        planned: Model = make()
        if context.config is not None and self.tokenizer is not None:
            planned.prepare(corpus, self.tokenizer)
        replica: Model = make()
        return replica

    @pytest.fixture
    def payloads(self, model: Model, prompts: Sequence[Prompt]) -> Sequence[Payload]:
        """Payloads to evaluate: the demonstrations, encoded, and noised where the model learns them at drawn points."""
        shown = demonstrations(model, prompts)
        if len(shown) < 2:
            fault("the kit needs two payloads at least: give `prompts` demonstrations, or override `payloads`")
        return shown

    @pytest.fixture
    def steering(self, model: Model) -> Mapping[str, int]:
        """Texts of tokens that end or begin turns, or stand for something else than text, with their ids."""
        tokenizer = getattr(model, "tokenizer", None)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            pytest.skip("not given: no tokenizer whose special tokens the kit knows; override the fixture `steering`")
        # Of the ordinary vocabulary, what ends a completion is a word elsewhere, such as the end of a line.
        stops = model.facts().stop_ids & tokenizer.added_tokens_decoder.keys()
        ids = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} | stops
        return {str(tokenizer.convert_ids_to_tokens(id_)): id_ for id_ in sorted(ids)}

    @pytest.fixture
    def subject(  # noqa: PLR0917 - all that a test class may override
        self,
        options: Mapping[str, JSON],
        context: ModelContext,
        make: Callable[..., Any],
        model: Model,
        capabilities: ModelCapabilities,
        prompts: Sequence[Prompt],
        payloads: Sequence[Payload],
    ) -> Subject:
        """The model, and what it is tested with."""
        return Subject(
            maker=PluginModel(plugin=self.plugin, options=options, context=context),
            make=make,
            model=model,
            capabilities=capabilities,
            prompts=prompts,
            payloads=payloads,
            temperatures=self.temperatures,
            tolerance=self.tolerance,
            reference=self.reference,
            load_exported=self.load_exported,
        )

    def reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, temperature: float
    ) -> list[Decided]:
        """Decisions of each payload, by other means than `decide` of a packed row."""
        if foreign := {payload.kind for payload in payloads} - {KIND}:
            fault(
                f"the kit has no reference for payloads of kind {', '.join(sorted(foreign))}; "
                "override ModelConformance.reference"
            )
        return reference_decisions(model, module, payloads, temperature)

    def load_exported(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """The tensors of an exported folder by canonical name, as the family's public library reads them."""
        loaded, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        # What the files lack, transformers draws.
        return {name: tensor for name, tensor in loaded.state_dict().items() if name not in report["missing_keys"]}
