"""Pipelines against one process: the same log-probs, losses and gradients."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import DataError
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, tokens_payload
from cosmos_core.models.building import draw
from cosmos_core.models.parallel.parallelize import parallelize
from cosmos_core.models.parallel.plan import plan_for
from cosmos_core.models.parallel.stages import Stages, cut
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.mesh.pipeline import Forward
from cosmos_core.policy.mesh.schedules import num_filled
from cosmos_core.policy.training.executor import Sequential, make_executor
from cosmos_core.protocols import Layout, ModelContext
from cosmos_core.testing.worlds import WorldFailedError, run_world

SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
TEMPERATURE = 0.7
PRIOR = 2.0**-6


def tiny(kind, is_tied, layers=8):
    return {
        "model_type": kind,
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": is_tied,
        "initializer_range": 0.2,
    }


class PassingViews(HuggingFaceModel):
    """Its stages pass views on, which torch cannot detach in place."""

    def advance(self, stage, batch, received):
        return super().advance(stage, batch, received)[:]


def make(config):
    model = PassingViews(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=Path("nowhere")))
    return model, draw(model._blueprint(seed=3, dtype=torch.float32, device=torch.device("cpu")))


def make_batches(model, number, seed=0):
    """Ragged sequences in exactly `number` micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [9, 5, 3, 8, 6, 4, 7, 5, 9, 6, 8, 9, 5, 7][: 2 * number]

    def draw(count):
        return torch.randint(1, 64, (count,), generator=generator).tolist()

    payloads = [tokens_payload(draw(3), draw(length)) for length in lengths]
    packings = (model.pack(payloads, budget=budget, multiple=2, is_uniform=True) for budget in range(11, 200))
    batches = next(packed for packed in packings if len(packed) == number)
    assert len({batch.num_decisions for batch in batches}) > 1 or number == 1
    return batches


def weighted(index, decided):
    """A loss in which each decision counts differently."""
    weights_N = torch.linspace(-1.0, 1.0, len(decided.logprobs_N)) + 0.1 * index
    return torch.dot(decided.logprobs_N.exp(), weights_N)


def run(executor, module, batches):
    """Evaluate, then train on gradients that are there already; all that came of it."""
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, PRIOR)
    held = {name: parameter.grad for name, parameter in module.named_parameters()}
    decided = executor.evaluate(batches, Forward(temperature=TEMPERATURE, with_entropy=True))
    losses = {}

    def loss(index, decided):
        assert index not in losses
        value = weighted(index, decided)
        losses[index] = value.item()
        return value

    executor.train(batches, Forward(temperature=TEMPERATURE, with_entropy=False), loss=loss)
    assert all(parameter.grad is held[name] for name, parameter in module.named_parameters())
    full = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in held.items()}
    gradients = {name: gradient - PRIOR for name, gradient in full.items()}
    evaluated = decided and [(each.logprobs_N, each.entropy_N) for each in decided]
    return evaluated, losses, gradients


@torch.no_grad()
def update(module):
    for parameter in module.parameters():
        parameter.mul_(0.9)


def member(config, sizes, schedule, numbers, recompute="none", frees=False):  # noqa: PLR0917 - of a process
    mesh = form_mesh(MeshConfig(**sizes), "cpu")
    layout = Layout(
        mesh=mesh,
        stages_per_rank=1 if schedule == "1f1b" else 2,
        is_v_shaped=schedule == "zero-bubble",
        reshard_after_forward=frees,
        recompute=recompute,
    )
    model, whole = make(config)
    stages = cut(whole, layout)
    if mesh.world_size > mesh.size("pp") or recompute != "none":
        for stage in stages:
            parallelize(stage, layout, plan_for(stage, {}))
    module = Stages(stages)
    executor = make_executor(model, module, mesh, schedule)
    num_data = mesh.size("dp_shard")
    results = []
    for number in numbers:
        batches = make_batches(model, number * num_data)[mesh.place("dp_shard") * number :][:number]
        results.append(run(executor, module, batches))
        update(module)
    return results


def check(config, sizes, schedule, numbers=(3,), *, recompute="none", frees=False):
    answers = run_world(math.prod(sizes.values()), member, config, sizes, schedule, numbers, recompute, frees)
    model, whole = make(config)
    num_data = sizes.get("dp_shard", 1)
    width = math.prod(sizes.values()) // sizes["pp"]
    last_place = 0 if schedule == "zero-bubble" else sizes["pp"] - 1
    for turn, number in enumerate(numbers):
        batches = make_batches(model, number * num_data)
        evaluated = []
        gradients = {name: torch.zeros_like(parameter) for name, parameter in whole.named_parameters()}
        for data in range(num_data):
            own = batches[data * number :][:number]
            decided, losses, found = run(Sequential(model, whole), whole, own)
            for name, gradient in found.items():
                gradients[name] += gradient
            rank = last_place * width + data * (width // num_data)
            evaluated = answers[rank][turn][0]
            assert len(evaluated) == len(decided)
            for got, wanted in zip(evaluated, decided, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-6, atol=2e-6)
            assert answers[rank][turn][1] == pytest.approx(losses, rel=1e-6, abs=1e-6)
            for other in range(sizes["pp"] * width):
                if other // width != last_place:
                    assert answers[other][turn][:2] == (None, {})
        # One process of each place in the pipeline: those that differ in data hold the same gradients.
        gathered = {}
        for place in range(sizes["pp"]):
            for name, gradient in answers[place * width][turn][2].items():
                gathered[name] = gathered.get(name, 0.0) + gradient
        assert gathered.keys() == gradients.keys()
        update(whole)
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 0.0
            difference = (gathered[name] - gradient).norm() / gradient.norm()
            assert difference < 1e-5, f"{name}: {difference}"


def test_two_processes_tied():
    # Twice, with another number of micro-batches of another size, fewer than processes among them.
    for schedule in SCHEDULES:
        check(tiny("qwen3", is_tied=True), {"pp": 2}, schedule, numbers=(3, 1, 5))


def test_sharded_weights_that_are_freed_after_each_pass():
    check(tiny("qwen3", is_tied=True, layers=4), {"pp": 2, "dp_shard": 2}, "1f1b", numbers=(3, 2), frees=True)


def most_gathered(frees):
    """The most layers whose whole weights, and those whose whole gradients, a process has at the end of a backward."""
    mesh = form_mesh(MeshConfig(pp=2, dp_shard=2), "cpu")
    layout = Layout(mesh=mesh, reshard_after_forward=frees)
    model, whole = make(tiny("llama", is_tied=False))
    (stage,) = cut(whole, layout)
    parallelize(stage, layout, plan_for(stage, {}))
    layers = list(stage.get_decoder().layers)
    most = [0, 0]

    def look(*_):
        groups = [layer._get_fsdp_state()._fsdp_param_groups[0] for layer in layers if isinstance(layer, FSDPModule)]
        kept = [any(_has_gradient(each) for each in group.fsdp_params) for group in groups]
        most[:] = max(most[0], sum(group.is_unsharded for group in groups)), max(most[1], sum(kept))

    for layer in layers:
        layer.register_forward_pre_hook(look)
    executor = make_executor(model, Stages([stage]), mesh, "1f1b")
    executor.train(make_batches(model, 3), Forward(temperature=1.0, with_entropy=False), loss=weighted)
    return most


def _has_gradient(part):
    gradient = part.unsharded_accumulated_grad
    return gradient is not None or (hasattr(part, "_unsharded_param") and part._unsharded_param.grad is not None)


def test_freed_weights_are_gathered_a_layer_or_two_at_a_time():
    kept, freed = (run_world(4, most_gathered, frees) for frees in (False, True))
    assert kept == [[4, 4]] * 4
    assert all(weights <= 2 and gradients == 0 for weights, gradients in freed)


def test_collectives_inside_a_split_backward():
    check(tiny("qwen3", is_tied=True, layers=4), {"pp": 2, "tp": 2}, "zero-bubble", numbers=(2,))


def failing(schedule):
    mesh = form_mesh(MeshConfig(pp=2), "cpu")
    layout = Layout(mesh=mesh, stages_per_rank=1 if schedule == "1f1b" else 2, is_v_shaped=schedule == "zero-bubble")
    model, whole = make(tiny("qwen3", is_tied=False, layers=4))
    executor = make_executor(model, Stages(cut(whole, layout)), mesh, schedule)

    def loss(index, decided):
        raise DataError("the loss of a micro-batch")

    executor.train(make_batches(model, 3), Forward(temperature=1.0, with_entropy=False), loss=loss)


def test_an_error_of_a_stage_surfaces_as_it_is():
    with pytest.raises(WorldFailedError, match=r"(?s)rank . of 2 failed.*\n.*DataError: the loss of a micro-batch\n$"):
        run_world(2, failing, "zero-bubble")


def idle(schedule):
    mesh = form_mesh(MeshConfig(pp=2), "cpu")
    layout = Layout(mesh=mesh, stages_per_rank=1 if schedule == "1f1b" else 2, is_v_shaped=schedule == "zero-bubble")
    model, whole = make(tiny("qwen3", is_tied=False, layers=4))
    executor = make_executor(model, Stages(cut(whole, layout)), mesh, schedule)
    executor.train([], Forward(temperature=1.0, with_entropy=False), loss=weighted)
    return executor.evaluate([], Forward(temperature=1.0))


def test_a_step_without_micro_batches():
    for schedule, last in (("1f1b", 1), ("zero-bubble", 0)):
        answers = run_world(2, idle, schedule)
        assert answers[last] == []
        assert answers[1 - last] is None


def test_schedules_that_need_more_micro_batches():
    for number, size, schedule, filled in [
        (3, 4, "1f1b", 4),
        (5, 4, "1f1b", 5),
        (3, 4, "interleaved", 3),
        (5, 2, "interleaved", 6),
        (10, 4, "interleaved", 10),
        (11, 4, "interleaved", 12),
        (1, 4, "zero-bubble", 1),
    ]:
        assert num_filled(number, size, schedule) == filled
