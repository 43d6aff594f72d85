"""Layouts are tried on a small model: what differs is refused, what could not be tried is told."""

import functools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import attrs
import pytest

from cosmos_core.config.schema import MeshConfig, PolicyConfig
from cosmos_core.errors import UnevenError, UntriedError
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.models.small import trial_payloads
from cosmos_core.policy import trial
from cosmos_core.policy.trial import Findings, tried, try_axes
from cosmos_core.protocols import ModelCapabilities, ModelContext, ModelFacts
from cosmos_core.protocols.model import Trial
from cosmos_core.testing.worlds import PRELOADED

NANOCHAT = {
    "model_type": "nanochat", "vocab_size": 64, "hidden_size": 72, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 9, "num_key_value_heads": 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))


def model_of(config, make=HuggingFaceModel, **context):
    context = ModelContext(path=None, config=config, assets=Path("/none"), **context)
    return make(HuggingFaceOptions(), context)


def test_an_axis_is_refused_for_what_differs_and_not_for_how_small_the_model_is():
    found = try_axes(PolicyConfig(), model_of(NANOCHAT, trust_remote_code=True), {"pp", "tp"})
    assert not found.untried
    # Three processes would share its nine heads; two share those of the small model.
    assert found.refused.keys() == {"pp"}
    assert found.refused["pp"].startswith("a small model of its make trains otherwise on 2 processes than on one: loss")


def test_code_that_comes_with_a_checkpoint_is_not_tried_and_that_is_told():
    model = model_of(NANOCHAT, trust_remote_code=True)
    model.config.auto_map = {"AutoModelForCausalLM": "somebody/model--modeling.Own"}
    found = try_axes(PolicyConfig(), model, {"pp"})
    assert found == Findings(untried={"pp": "the checkpoint's own code makes it (model.trust_remote_code)"})


class Faulty(HuggingFaceModel):
    """Fails along each axis in another way."""

    def build(self, *, layout=None, **how):
        sizes = {} if layout is None else {axis: layout.mesh.size(axis) for axis in ("cp", "dp_shard", "ep", "pp")}
        if sizes.get("cp", 1) > 1:
            raise UnevenError("2 does not divide the 9 heads")
        if sizes.get("ep", 1) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if sizes.get("dp_shard", 1) > 1:
            raise ValueError("no such layer\nin it")
        if sizes.get("pp", 1) > 1:
            time.sleep(60)
        return super().build(layout=layout, **how)

    def trial(self, *, num_layers):
        assert num_layers == 2
        return Trial(make=functools.partial(model_of, NANOCHAT, Faulty), payloads=trial_payloads(64))


def test_faults_of_the_machine_are_told_once_and_no_property_of_the_model():
    found = try_axes(PolicyConfig(), model_of(NANOCHAT, Faulty), {"cp", "dp_shard", "ep", "pp", "tp"})
    killed = "a process ended with exit code -9; the machine may lack memory for it"
    assert found == Findings(
        refused={"dp_shard": "a small model of its make fails on 2 processes: ValueError: no such layer"},
        untried={"cp": "2 does not divide the 9 heads", "ep": killed, "pp": killed, "tp": killed},
    )


def test_processes_that_do_not_finish_are_given_up_for_all_axes(monkeypatch):
    monkeypatch.setattr(trial, "_TIMEOUT_S", -10.0)
    found = try_axes(PolicyConfig(), model_of(NANOCHAT, Faulty), {"pp", "tp"})
    assert not found.refused
    assert [each[:38] for each in found.untried.values()] == ["2 processes did not finish a step with"] * 2


@attrs.frozen
class Untried:
    """A model with facts and without a small one."""

    def facts(self):
        return ModelFacts(architecture="own", num_parameters=1, num_layers=2, hidden_size=4, context_length=9)

    def trial(self, *, num_layers):
        raise UntriedError(f"{num_layers} layers are too many")


@pytest.mark.parametrize("sizes", [{}, {"dp_replicate": 2}, {"pp": 2, "tp": 2}])
def test_what_could_not_be_tried_is_among_the_notices(sizes):
    policy = PolicyConfig(mesh=MeshConfig(**sizes))
    facts = tried(policy, Untried(), ModelCapabilities(mesh_axes=frozenset({"dp_replicate", "pp", "tp"})))
    said = "not tried whether a small model of its make trains so as on one process: 2 layers are too many"
    assert facts.notices == ((f"policy.mesh.pp, policy.mesh.tp: {said}",) if "pp" in sizes else ())
    assert not facts.impossible
