"""What the tests of the model kit stand on: a tiny model, some rows, and their payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import pytest
import torch
from transformers import AutoModelForCausalLM

from cosmos_core.models.tokens import KIND
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Decided, Kind, Model, ModelContext
from cosmos_core.testing.conformance.model import reference
from cosmos_core.testing.conformance.model.evaluation import demonstrations
from cosmos_core.testing.conformance.plugin import OneThread, fault
from cosmos_core.types import JSON, Payload, Prompt

CPU: Final = torch.device("cpu")
SEED: Final = 0

Reload: TypeAlias = Callable[[Path], Model]


class ModelSetting(OneThread):
    """The class variables, fixtures and methods that `ModelConformance` documents."""

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
        rows = [
            ("Ann has 3 apples and buys 4 more. How many?", "3+4=7\n#### 7"),
            ("2+2=", "4"),
            ("Zoë zählt: 12, 13,", "14 😀"),
            ("How many?", "Twenty-one"),
            ("a", ""),
            ("One, two, three, four, five, six,", "seven, eight, nine, ten, eleven"),
        ]
        return tuple(Prompt(text=text, demonstration=answer) for text, answer in rows)

    @pytest.fixture
    def corpus(self, prompts: Sequence[Prompt]) -> Sequence[str]:
        """What a tokenizer is trained on."""
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
    def module(self, model: Model) -> torch.nn.Module:
        """Its weights, as a trainer has them."""
        return model.build(seed=SEED, dtype=torch.float32, device=CPU)

    @pytest.fixture
    def payloads(self, model: Model, prompts: Sequence[Prompt]) -> Sequence[Payload]:
        """What is evaluated: the demonstrations, encoded, and noised where the model learns them at drawn points."""
        shown = demonstrations(model, prompts)
        if len(shown) < 2:
            fault("the kit needs two payloads at least: give `prompts` demonstrations, or override `payloads`")
        return shown

    @pytest.fixture
    def reload(self, plugins: PluginSet, options: Mapping[str, JSON], tmp_path: Path) -> Reload:
        """Make the plugin's model from a folder that was exported."""

        def load(directory: Path) -> Model:
            context = ModelContext(path=str(directory), config=None, assets=tmp_path / "nothing-made-locally")
            model: Model = plugins.create(self.kind, self.plugin, options, context)
            return model

        return load

    def reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, temperature: float
    ) -> list[Decided]:
        """What each payload's decisions are, by other means than `decide` of a packed row."""
        if foreign := {payload.kind for payload in payloads} - {KIND}:
            fault(
                f"the kit has no reference for payloads of kind {', '.join(sorted(foreign))}; "
                "override ModelConformance.reference"
            )
        return reference.decisions(model, module, payloads, temperature)

    def load_exported(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """The tensors of an exported folder by canonical name, as the family's public library reads them."""
        loaded, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        # What the files lack, transformers draws.
        return {name: tensor for name, tensor in loaded.state_dict().items() if name not in report["missing_keys"]}
