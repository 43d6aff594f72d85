"""The kit for models: what a test class sets and overrides, with the tests of its parts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from cosmos_core.models.tokens import KIND, values
from cosmos_core.protocols import Decided, Kind, Model, ModelCapabilities, ModelContext
from cosmos_core.testing.conformance.model.decisions import DecisionTests
from cosmos_core.testing.conformance.model.denoising import DenoisingTests
from cosmos_core.testing.conformance.model.layouts import LayoutTests
from cosmos_core.testing.conformance.model.rows import PackingTests, RowTests, demonstrations
from cosmos_core.testing.conformance.model.subject import Subject
from cosmos_core.testing.conformance.model.weights import WeightTests
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
    WeightTests, RowTests, PackingTests, DecisionTests, DenoisingTests, LayoutTests, PluginConformance
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
        payloads: What is packed and evaluated; the demonstrations of `prompts`, noised where the model is a
            `WorldModel`. At least two, of different lengths, and one at least of each payload kind that is declared.
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
        if context.config is not None and self.tokenizer is not None:
            make().prepare(corpus, self.tokenizer)
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
        model: Model,
        capabilities: ModelCapabilities,
        prompts: Sequence[Prompt],
        payloads: Sequence[Payload],
    ) -> Subject:
        """The model, and what it is tested with."""
        maker = PluginModel(plugin=self.plugin, options=options, context=context)
        return Subject(
            kit=self, maker=maker, model=model, capabilities=capabilities, prompts=prompts, payloads=payloads
        )

    def reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, temperature: float
    ) -> list[Decided]:
        """Decisions of each payload, by other means than `decide` of a packed row."""
        if foreign := {payload.kind for payload in payloads} - {KIND}:
            fault(
                f"no reference for payloads of kind {', '.join(sorted(foreign))}; override ModelConformance.reference"
            )
        with tempfile.TemporaryDirectory() as folder:
            model.export(module, Path(folder))
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found = []
        for payload in payloads:
            prompt, completion = (torch.tensor(values(payload, name).tolist()) for name in ("prompt", "completion"))
            ids = torch.cat([prompt, completion]).long()
            with torch.no_grad():
                # The first decision is taken at the last unit of the prompt, and the last unit predicts nothing.
                logits_NV = theirs(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            logprobs_NV = (logits_NV.float() / temperature).log_softmax(-1)
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).nan_to_num(0.0).sum(-1)
            found.append(
                Decided(logprobs_N=logprobs_NV.gather(1, completion.long()[:, None])[:, 0], entropy_N=entropy_N)
            )
        return found

    def load_exported(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """The tensors of an exported folder by canonical name, as the family's public library reads them."""
        loaded, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        # What the files lack, transformers draws.
        return {name: tensor for name, tensor in loaded.state_dict().items() if name not in report["missing_keys"]}
