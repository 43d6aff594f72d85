"""Frozen models are asked about the policy's own sequences: they must encode rows as it does."""

from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.errors import DataError, UntriedError
from cosmos_core.protocols import ModelCapabilities, ModelFacts
from cosmos_core.run.planning import frozen
from cosmos_core.types import Array, Payload, Prompt

RECIPE = {
    "run": {"name": "demo", "steps": 6},
    "model": {"plugin": "hf", "config": {"model_type": "qwen3"}},
    "algorithm": {"plugin": "distill"},
    "dataset": {"plugin": "jsonl"},
    "policy": {"optimizer": {"lr": 1e-6}, "mesh": {"pp": 2}, "lora": {"modules": ["all-linear"]}},
    "teacher": {"path": "somewhere", "plugin": "moe"},
}

FACTS = ModelFacts(architecture="moe", num_parameters=1, num_layers=2, hidden_size=1, context_length=9)
OWN = attrs.evolve(FACTS, architecture="own")
CAPABILITIES = ModelCapabilities(mesh_axes=frozenset({"pp"}))


class Characters:
    """Encodes texts by their characters, and refuses those that it has no template for."""

    def __init__(self, offset=0, refuses=""):
        self._offset, self._refuses = offset, refuses

    def facts(self):
        return FACTS

    def trial(self, *, num_layers):
        raise UntriedError("of code of its own")

    def encode(self, prompt):
        if prompt.text == self._refuses:
            raise DataError("no chat template")
        ids = np.frombuffer(prompt.text.encode(), dtype=np.uint8).astype(np.int32) + self._offset
        return Payload(kind="tokens", arrays={"prompt": Array(dtype="int32", shape=ids.shape, data=ids.tobytes())})


@pytest.fixture
def found(monkeypatch):
    """What planning finds of a teacher beside a policy."""

    def find(policy, teacher):
        monkeypatch.setattr(frozen, "load_model", lambda *_: teacher)
        source = SimpleNamespace(plugin="moe")
        monkeypatch.setattr(frozen, "frozen_source", lambda *_: source)
        plugins = SimpleNamespace(provider=lambda kind, name: SimpleNamespace(capabilities=CAPABILITIES))
        rows = SimpleNamespace(row=lambda split, index: Prompt(text=f"row {index}"))
        recipe = recipe_from({**RECIPE, "reference": {}})
        facts = frozen.frozen_facts(SimpleNamespace(recipe=recipe), plugins, (policy, OWN), rows, 3)
        # The policy's own model is asked nothing.
        assert (facts["reference"].facts, facts["reference"].misfit) == (OWN, "")
        return facts["teacher"]

    return find


def test_rows_that_are_encoded_otherwise_are_told(found):
    # What is found of a teacher is its own.
    each = found(Characters(), Characters())
    assert (each.plugin, each.capabilities, each.misfit) == ("moe", CAPABILITIES, "")
    # It lies on the policy's mesh, and is tried there.
    (notice,) = each.facts.notices
    assert notice.startswith("policy.mesh.pp: not tried")
    assert attrs.evolve(each.facts, notices=()) == FACTS
    assert found(Characters(), Characters(1)).misfit == (
        "train row 0 ('row 0') has another 'prompt' for it than for the policy"
    )

    # A row that only the other model refuses is a misfit.
    assert found(Characters(), Characters(refuses="row 2")).misfit == (
        "train row 2 ('row 2'), which the policy encodes, is refused by it (no chat template)"
    )
    assert found(Characters(refuses="row 2"), Characters(refuses="row 2")).misfit == ""
