"""Replay from end to end: what the embedded engine's routers chose is what training uses."""

import copy

import numpy as np
import pytest
import torch

from cosmos_core.errors import ConfigError
from cosmos_core.models import tokens_payload, values
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, Request, Sampling
from cosmos_model_moe import routing

pytestmark = pytest.mark.nightly

FAMILIES = {"qwen3-moe": 3, "deepseek": 2}
PROMPTS = ([5, 17, 90, 33, 7, 8, 120], [41, 42], [200, 3, 77, 9])


@pytest.fixture
def roll_out(make):
    """Completions of the embedded engine, and the model and weights that made them."""
    engines = []

    def rolled(family, *, replay=True, **engine_options):
        model = make(family, router_replay=replay)
        context = EngineContext(
            model=model,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_in_flight=5,
            context_length=64,
            seed=5,
        )
        engine = PluginSet.load([("engine", "embedded")]).create("engine", "embedded", engine_options, context)
        engine.start()
        engines.append(engine)
        sampling = Sampling(max_units=12, num_samples=4)
        requests = [
            Request(request_id=str(index), prompt=tokens_payload(prompt), sampling=sampling, seed=index)
            for index, prompt in enumerate(PROMPTS)
        ]
        return [made.payload for handle in engine.submit(requests) for made in handle.result(30)]

    yield rolled
    for engine in engines:
        engine.shutdown()


def experts_of(payload):
    array = payload.arrays["experts"]
    return torch.from_numpy(np.frombuffer(array.data, np.int16).reshape(array.shape).astype(np.int64))


def evaluate(model, module, payload):
    """Log-probs, and what each layer with experts used: int64 [U, K] by layer."""
    used = {}

    def note(layer):
        return lambda _, __, output: used.__setitem__(layer, output[2])

    hooks = [
        router.register_forward_hook(note(int(name.rpartition(".")[2]))) for name, router in routing.routers(module)
    ]
    (batch,) = model.pack([payload], budget=64)
    with torch.no_grad():
        logprobs_N = model.decide(module, batch, temperature=1.0).logprobs_N
    for hook in hooks:
        hook.remove()
    return logprobs_N, used


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"prefill_units": 3, "cache_step": 4}], ids=["whole", "pieces"])
def test_what_the_engine_records_is_what_its_routers_chose(make, build, roll_out, family, options):
    free = make(family)
    module = build(free)
    for payload in roll_out(family, **options):
        experts_ULK = experts_of(payload)
        assert experts_ULK.shape == (len(values(payload, "prompt")) + len(values(payload, "completion")) - 1, 3, 2)
        logprobs_N, used = evaluate(free, module, payload)
        assert len(used) == FAMILIES[family]
        for layer in range(3):
            expected_UK = used.get(layer, torch.full_like(experts_ULK[:, 0], routing.NO_CHOICE))
            assert torch.equal(experts_ULK[:, layer].sort().values, expected_UK.sort().values)
        assert np.allclose(values(payload, "logprobs"), logprobs_N.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_equal_weights_replay_changes_no_log_prob(make, build, roll_out, family):
    free, replaying = make(family), make(family, router_replay=True)
    module = build(free)
    replayed = build(replaying)
    for payload in roll_out(family):
        one, other = evaluate(free, module, payload)[0], evaluate(replaying, replayed, payload)[0]
        assert (one - other).abs().max() < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_whose_routers_would_choose_otherwise_uses_what_the_rollout_chose(make, build, roll_out, family):
    free, replaying = make(family), make(family, router_replay=True)
    modules = [build(free), build(replaying)]
    for module in modules:
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for _, router in routing.routers(module):
                router.weight.add_(torch.randn(router.weight.shape, generator=draw))
    num_others = apart = 0
    for payload in roll_out(family):
        experts_ULK = experts_of(payload)
        own, chosen = evaluate(free, modules[0], payload)
        replayed, used = evaluate(replaying, modules[1], payload)
        for layer, experts_UK in used.items():
            assert torch.equal(experts_UK, experts_ULK[:, layer])
            num_others += int((chosen[layer].sort().values != experts_UK.sort().values).any(-1).sum())
        apart = max(apart, (own - replayed).abs().max().item())
    assert num_others > 100, "the routers choose as before, so nothing is proved"
    assert apart > 0.1


def test_gradients_reach_the_routers_through_the_experts_that_the_rollout_chose(make, build, roll_out):
    model = make("qwen3-moe", router_replay=True)
    module = build(model)
    payloads = roll_out("qwen3-moe")
    other = copy.deepcopy(module)
    for each in (module, other):
        if each is other:
            with torch.no_grad():
                for _, router in routing.routers(each):
                    router.weight.neg_()
        (batch,) = model.pack(payloads[:1], budget=64)
        model.decide(each, batch, temperature=1.0).logprobs_N.sum().backward()
        used_E = torch.bincount(experts_of(payloads[0])[:, 0].flatten(), minlength=4) > 0
        moved_E = each.model.layers[0].mlp.experts.down_proj.grad.flatten(1).abs().amax(1) > 0
        assert torch.equal(moved_E, used_E)


def test_nothing_is_recorded_where_nothing_is_replayed(make, roll_out):
    assert make("qwen3-moe").records() == ()
    assert all("experts" not in payload.arrays for payload in roll_out("qwen3-moe", replay=False))


def test_a_model_without_experts_has_nothing_to_replay(make):
    model = make("qwen3-moe", {"mlp_only_layers": [0, 1, 2]}, router_replay=True)
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="none of the 3 layers of this Qwen3MoeForCausalLM has experts"):
        model.record(module)
