"""Hooked routers: what is put into the gradient, counted, moved and replayed."""

import attrs
import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models import values
from cosmos_core.types import Array
from cosmos_model_moe import balance, routing
from cosmos_model_moe.gating import SIGMOID

LAYERS = {"qwen3-moe": 3, "deepseek": 2}


def decided(model, module, payloads, budget, *, is_learned=True):
    """Forward, backward and the sum of log-probs, as the trainer does: each sequence's mean weighs the same."""
    total = 0.0
    for batch in model.pack(payloads, budget=budget):
        weights = [torch.full((n,), 1 / (len(payloads) * n)) for n in batch.num_decisions]
        weights_N = torch.cat(weights)
        learned = attrs.evolve(batch, weights_N=weights_N if is_learned else None)
        logprobs_N = model.decide(module, learned, temperature=1.0).logprobs_N
        loss = -torch.dot(logprobs_N, weights_N)
        loss.backward()
        total += loss.item()
    return total


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


def reference_penalties(family, module, payloads, auxiliary, z):
    """The losses written out with transformers' own forward, each sequence alone."""
    total = 0.0
    for payload in payloads:
        ids = np.concatenate((values(payload, "prompt"), values(payload, "completion")))[:-1]
        seen = []
        hooks = [
            router.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output), prepend=True)
            for _, router in routing.routers(module)
        ]
        module.set_attn_implementation("sdpa")
        module(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
        module.set_attn_implementation("cosmos_packed")
        for hook in hooks:
            hook.remove()
        for logits_UE, _, experts_UK in seen:
            if family == "qwen3-moe":
                loss = load_balancing_loss_func((logits_UE,), num_experts=4, top_k=2)
            else:
                affinity_UE = SIGMOID.probabilities(logits_UE)
                load_E = torch.bincount(experts_UK.flatten(), minlength=4) * 4 / (2 * len(ids))
                loss = load_E @ affinity_UE.mean(0)
            total = total + (auxiliary * loss + z * logits_UE.logsumexp(-1).square().mean()) / len(payloads)
    return total


def test_the_losses_reach_the_gradient_as_if_they_were_added(make, build, payloads, subtests):
    for family in LAYERS:
        with subtests.test(family=family):
            model = make(family, auxiliary_loss=0.7, z_loss=0.2)
            module = build(model)
            loss = decided(model, module, payloads, budget=100)
            ours = gradients(module)

            plain = make(family)
            reference = build(plain)
            assert decided(plain, reference, payloads, budget=100) == pytest.approx(loss, abs=1e-6)
            without = gradients(reference)
            reference_penalties(family, reference, payloads, 0.7, 0.2).backward()
            assert difference(ours, gradients(reference)) < 1e-5
            assert difference(ours, without) > 1e-2


def test_nothing_depends_on_the_micro_batches(make, build, payloads, subtests):
    for family in LAYERS:
        with subtests.test(family=family):
            results = []
            for budget in (100, 10):
                model = make(family, auxiliary_loss=0.7, z_loss=0.2)
                module = build(model)
                decided(model, module, payloads, budget=budget)
                results.append((gradients(module), model.counters(module)))
            (one, counters), (other, others) = results
            assert difference(one, other) < 1e-5
            assert [counter.tolist() for counter in counters] == [counter.tolist() for counter in others]


def test_each_learned_unit_is_counted_once_though_activations_are_recomputed(make, build, payloads, subtests):
    for family, num_layers in LAYERS.items():
        with subtests.test(family=family):
            num_units = sum(len(values(p, "prompt")) + len(values(p, "completion")) - 1 for p in payloads)
            losses = {}
            for recompute in (False, True):
                model = make(family, auxiliary_loss=0.7, z_loss=0.2)
                module = build(model)
                if recompute:
                    module.gradient_checkpointing_enable({"use_reentrant": False})
                    module.train()
                decided(model, module, payloads, budget=14)
                counters = model.counters(module)
                assert [counter.sum().item() for counter in counters] == [num_units * 2] * num_layers
                losses[recompute] = gradients(module)
            assert difference(losses[True], losses[False]) == 0.0


def test_padding_and_what_is_not_learned_from_count_nothing(make, build, payloads):
    model = make("qwen3-moe", auxiliary_loss=0.7)
    module = build(model)
    decided(model, module, payloads, budget=100, is_learned=False)
    with torch.no_grad():
        (batch,) = model.pack(payloads, budget=100)
        model.decide(module, attrs.evolve(batch, weights_N=torch.ones(len(batch.inputs["targets"]))), temperature=1.0)
    assert all(counter.sum() == 0 for counter in model.counters(module))
    (padded,) = model.pack(payloads, budget=100, multiple=64)
    weights_N = torch.ones(len(padded.inputs["targets"]))
    model.decide(module, attrs.evolve(padded, weights_N=weights_N), temperature=1.0)
    real = int(padded.inputs["lengths"][: len(payloads)].sum())
    assert padded.num_units > real
    assert [counter.sum().item() for counter in model.counters(module)] == [real * 2] * 3


def test_a_step_moves_the_bias_towards_the_idle(make, build, payloads):
    model = make("deepseek", bias_rate=0.25)
    module = build(model)
    decided(model, module, payloads, budget=100)
    loads = [counter.clone() for counter in model.counters(module)]
    metrics = model.after_step(module)
    biases = [router.e_score_correction_bias for _, router in routing.routers(module)]
    assert len(biases) == len(loads) == 2
    for bias_E, load_E in zip(biases, loads, strict=True):
        assert bias_E.tolist() == (0.25 * (load_E.mean() - load_E).sign()).tolist()
    assert metrics == {"expert_imbalance": pytest.approx(max(map(balance.imbalance, loads)))}


def test_a_bias_balances_a_lopsided_router(make, build, payloads):
    model = make("moonlight", bias_rate=0.05)
    module = build(model)
    with torch.no_grad():
        for _, router in routing.routers(module):
            router.e_score_correction_bias += torch.tensor([0.9, 0.9, 0.0, 0.0])
    course = []
    for _ in range(25):
        for counter in model.counters(module):
            counter.zero_()
        decided(model, module, payloads, budget=100)
        course.append(model.after_step(module)["expert_imbalance"])
    assert course[0] == pytest.approx(1.0)
    assert course[-1] < 0.5


def test_a_router_without_bias_is_refused(make, build):
    with pytest.raises(ConfigError, match=r"bias_rate.*has no bias.*auxiliary_loss"):
        build(make("qwen3-moe", bias_rate=0.001))


def test_without_options_nothing_is_hooked(make, build):
    model = make("qwen3-moe")
    module = build(model)
    assert model.counters(module) == []
    assert model.after_step(module) == {}
    assert not any(router._forward_hooks for _, router in routing.routers(module))


def recorded(payloads, family, experts_of, layers=3, top_k=2):
    """Payloads with the experts of each unit, as an engine would add them."""
    made = []
    for payload in payloads:
        units = len(values(payload, "prompt")) + len(values(payload, "completion")) - 1
        data = np.ascontiguousarray(experts_of(units, layers, top_k), dtype=np.int16)
        array = Array(dtype="int16", shape=data.shape, data=data.tobytes())
        made.append(attrs.evolve(payload, arrays={**payload.arrays, "experts": array}))
    return made


def used(module, model, payloads, budget):
    """The experts that each layer used, in the row's order."""
    seen = {}
    hooks = [
        router.register_forward_hook(lambda _, __, output, name=name: seen.setdefault(name, []).append(output))
        for name, router in routing.routers(module)
    ]
    with torch.no_grad():
        outcomes = [
            model.decide(module, batch, temperature=1.0).logprobs_N for batch in model.pack(payloads, budget=budget)
        ]
    for hook in hooks:
        hook.remove()
    return seen, outcomes


def test_replaying_its_own_choice_changes_nothing(make, build, payloads, subtests):
    for family in LAYERS:
        with subtests.test(family=family):
            model = make(family, router_replay=True)
            module = build(model)
            (batch,) = model.pack(payloads, budget=100)
            chosen, (free,) = used(module, model, payloads, 100)
            choice_LUK = torch.full((3, batch.num_units, 2), -1)
            for name, (output,) in chosen.items():
                choice_LUK[int(name.rpartition(".")[2])] = output[2]
            parts = iter(choice_LUK.transpose(0, 1).split(batch.inputs["lengths"].tolist()))
            by_payload = {index: next(parts) for index in batch.sequences}
            in_order = iter([by_payload[index].numpy() for index in range(len(payloads))])
            replayed = recorded(payloads, family, lambda *_, choices=in_order: next(choices))
            _, (again,) = used(module, model, replayed, 100)
            assert torch.equal(again, free)


def test_the_recorded_experts_are_used_with_the_weights_of_training(make, build, payloads, subtests):
    for family, num_layers in LAYERS.items():
        with subtests.test(family=family):
            model = make(family, router_replay=True)
            module = build(model)
            draw = np.random.default_rng(0)
            replayed = recorded(
                payloads,
                family,
                lambda U, L, K, draw=draw: draw.permuted(np.tile(np.arange(4), (U, L, 1)), axis=2)[..., :K],
            )
            for batch in model.pack(replayed, budget=14):
                seen, _ = used(module, model, [replayed[index] for index in batch.sequences], 14)
                assert len(seen) == num_layers
                for name, ((logits_UE, weights_UK, experts_UK),) in seen.items():
                    layer = int(name.rpartition(".")[2])
                    expected_UK = batch.inputs["experts"][:, layer].long()
                    assert torch.equal(experts_UK, expected_UK)
                    router = module.get_submodule(f"{name}.mlp.gate")
                    assert torch.equal(weights_UK, model.gating.weights(router, logits_UE, expected_UK))


def test_a_rollout_without_its_experts_is_refused_and_a_demonstration_is_routed_freely(make, build, payloads):
    model = make("qwen3-moe", router_replay=True)
    (batch,) = model.pack(payloads, budget=100)
    assert (batch.inputs["experts"] == -1).all()
    number = len(values(payloads[1], "completion"))
    logprobs = Array(dtype="float32", shape=(number,), data=np.zeros(number, dtype=np.float32).tobytes())
    payloads[1] = attrs.evolve(payloads[1], arrays={**payloads[1].arrays, "logprobs": logprobs})
    with pytest.raises(DataError, match=r"payload 1 has no array 'experts'.*router_replay = false"):
        model.pack(payloads, budget=100)
    wrong = recorded(payloads, "qwen3-moe", lambda U, L, K: np.zeros((U, L, K)), top_k=3)
    with pytest.raises(DataError, match=r"int16 \[10, 3, 3\]; int16 \[10, 3, 2\] is needed"):
        model.pack(wrong, budget=100)
