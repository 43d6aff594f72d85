"""Every architecture of the sweep on every axis: what planning accepts gives the loss and gradients of one process.

A model is tried in float32, as planning tries it, and compared in float64, where what is left of a difference is what
the model itself computes in float32.

What each axis can do is kept in `docs/architectures.md`, whose rows are compared here. `pytest -m sweep` runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from cosmos_core.config.schema import MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.models.tokenizer import build_tokenizer
from cosmos_core.policy.mesh.layout import misfits
from cosmos_core.policy.trial import try_axes
from cosmos_core.protocols import ModelCapabilities, ModelContext
from cosmos_core.protocols.layout import Axis
from cosmos_core.testing.layouts import PluginModel, step_alone, steps_in_layouts, worst_error
from tests.families import text_payloads
from tests.nightly.layouts.architectures import ARCHITECTURES, keys_of

pytestmark = pytest.mark.sweep

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"
ALL_AXES = ModelCapabilities(mesh_axes=frozenset(get_args(Axis)))
NO_EXPERTS = "it has no experts"


def policy(parallel=None, **mesh):
    return PolicyConfig(
        precision="fp32",
        micro_batch_units=64,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**(parallel or {})),
    )


AXES = {"fsdp": "dp_shard", "tp": "tp", "cp": "cp", "pp": "pp", "ep": "ep"}
COLUMNS = tuple(AXES)
LAYOUTS = {
    "fsdp": policy(dp_shard=2),
    "tp": policy(tp=2),
    "tp, no sequence parallel": policy(tp=2, parallel={"sequence_parallel": False}),
    "cp": policy(cp=2),
    "pp": policy(pp=2),
    "ep": policy(dp_shard=2, ep=2),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tokenizer, which planning asks for its end token."""
    folder = tmp_path_factory.mktemp("assets")
    made = build_tokenizer(["some text"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_axis_gives_what_one_process_gives_or_is_refused(assets, name):
    context = ModelContext(path=None, config=keys_of(name), assets=assets)
    model = PluginModel(plugin="hf", context=context)()
    facts = model.facts()
    refused = {label: found for label, each in LAYOUTS.items() if (found := misfits(each, ALL_AXES, facts))}
    found = try_axes(policy(), model, {AXES[column] for column in COLUMNS if column not in refused})
    assert not found.untried
    tried = found.refused
    refused |= {column: tried[AXES[column]] for column in COLUMNS if AXES[column] in tried}
    layouts = {label: each for label, each in LAYOUTS.items() if label not in refused}
    payloads, make = text_payloads(vocabulary=120), PluginModel(plugin="hf", context=context)
    expected = step_alone(make, payloads, policy(), dtype=torch.float64)
    dtypes = [torch.float64] * len(layouts)
    steps = steps_in_layouts(make, payloads, list(layouts.values()), processes=2, dtypes=dtypes)
    for label, stepped in zip(layouts, steps, strict=True):
        assert abs(stepped.loss - expected.loss) <= 1e-6 * abs(expected.loss), (label, stepped.loss, expected.loss)
        worst, error = worst_error(stepped.gradients, expected.gradients)
        assert error <= 5e-6, (label, worst, error)
    assert_on_page(row(name, facts, refused, tried))


def row(name, facts, refused, tried):
    """A line of the page's table; every axis divides all numbers here, so that only what makes no sense is refused."""
    # Without the numbers of a step that differs.
    reasons = {axis: f"tried: {reason.partition(': loss ')[0]}" for axis, reason in tried.items()} | facts.impossible
    why = {column: reasons[AXES[column]] for column in COLUMNS if column in refused}
    if not facts.attends_pluggably:
        why |= dict.fromkeys(("tp", "cp", "pp"), "one document a row")
    cells = {column: "" if column in why else "yes" for column in COLUMNS}
    if cells["tp"]:
        cells["tp"] = f"{share_split(facts):.0%}"
    told = [f"{column}: {reason}" for column, reason in why.items() if reason != NO_EXPERTS]
    return f"| {' | '.join((name, *cells.values(), '; '.join(told)))} |"


def share_split(facts):
    """Of the parameters of all layers that are no experts, those that `tp` splits."""
    layers = [part for part in facts.parts if part.is_layer]
    dense = sum(part.count * (part.num_parameters - part.num_expert_parameters) for part in layers)
    return 1 - sum(part.count * part.num_whole_parameters for part in layers) / dense


def assert_on_page(line):
    print(line)
    assert line in PAGE.read_text().splitlines(), f"{PAGE} should have the line\n{line}"


def test_the_page_lists_these_architectures_only():
    listed = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert listed == ["architecture", *ARCHITECTURES]
