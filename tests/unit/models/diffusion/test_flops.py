"""Operations of a transformer's blocks as they are told, against those that torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cosmos_core.models.diffusion import building
from cosmos_core.testing.families import make_tiny
from cosmos_model_cosmos_predict import CosmosPredictModel, CosmosPredictOptions
from cosmos_model_cosmos_predict import tiny as predict
from cosmos_model_wan import WanModel, WanOptions
from cosmos_model_wan import tiny as wan


@pytest.mark.parametrize(
    ("model", "options", "tiny"), [(WanModel, WanOptions, wan), (CosmosPredictModel, CosmosPredictOptions, predict)]
)
def test_what_no_latents_go_through_counts_by_its_rows(model, options, tiny, tmp_path, monkeypatch):
    counted = []

    def products(counter):
        return sum(number for kind, number in counter.flop_counts["Global"].items() if "mm" in str(kind))

    def count(family, shell, *, forward, **_):
        with FlopCounterMode(display=False) as counter:
            for block in building._blocks(shell, family.layers):
                block.register_forward_pre_hook(lambda *_: counted.append(-products(counter)))
                block.register_forward_hook(lambda *_: counted.append(products(counter)))
            forward(3)

    made = make_tiny(model, options, tiny.CONFIG, tiny.OPTIONS, tmp_path)()
    facts = made.facts()
    module = made.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(building, "make_shell", lambda _: module)
    monkeypatch.setattr(building, "facts_of", count)
    made.facts()
    assert 2 * facts.matrix_parameters * 3 * facts.rows_per_unit == pytest.approx(sum(counted), rel=0.01)
    inside = sum(part.count * part.num_parameters for part in facts.parts if part.is_layer)
    assert facts.matrix_parameters < 0.95 * inside, "text and one vector have fewer rows"
