"""Adapters against peft's own, and the files that peft and transformers read."""

from __future__ import annotations

import attrs
import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cosmos_core.config.schema import LoraConfig, PolicyConfig
from cosmos_core.models.parallel.lora import adapters_of, is_adapter, published_tensors
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.processes.world import single_world
from cosmos_core.testing.layouts import make_trainer, train_step
from cosmos_core.weights.digest import tensor_digests
from cosmos_core.weights.shards import canonical_tensors, local_shards
from cosmos_core.weights.snapshot import take_snapshot
from tests.families import CONFIGS, family, text_payloads

MODULES = ("q_proj", "v_proj", "down_proj")
CPU = torch.device("cpu")
TOKENS = torch.arange(3, 40)[None]


class Wordless:
    """Stands for a tokenizer, which these models have none of."""

    pad_token_id = None

    def save_pretrained(self, directory):
        pass


def build(name, modules=MODULES, seed=5):
    model = family("hf", CONFIGS[name])()
    model.text.tokenizer = Wordless()
    policy = PolicyConfig(precision="fp32", lora=LoraConfig(rank=4, alpha=12.0, modules=modules))
    layout = layout_of(policy, single_world().mesh, "cpu")
    module = model.build(seed=seed, dtype=torch.float32, device=CPU, layout=attrs.evolve(layout, compile=False))
    module.set_attn_implementation("eager")
    return model, module


def below(name, seed=5):
    module = family("hf", CONFIGS[name])().build(seed=seed, dtype=torch.float32, device=CPU)
    module.set_attn_implementation("eager")
    return module


def change(module):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def logits(module):
    with torch.no_grad():
        return module(input_ids=TOKENS, use_cache=False).logits


def test_what_is_published_has_the_bits_of_weights_and_adapters_added_all_at_once(tmp_path):
    _, module = build("qwen3")
    change(module)
    sums = {name: tensor for name, tensor in canonical_tensors(module).items() if not is_adapter(name)}
    for each in adapters_of(module):
        sums[f"{each.name}.weight"] = sums[f"{each.name}.weight"] + each.scale * (each.up_OR @ each.down_RI)
    snapshot = take_snapshot(1, local_shards(*published_tensors(module)), torch.bfloat16, directory=tmp_path)
    assert snapshot.digests() == tensor_digests({name: each.bfloat16() for name, each in sums.items()})


def test_forward_and_gradients_are_those_of_peft(subtests):
    for modules in [MODULES, ("all-linear",)]:
        with subtests.test(modules=modules):
            _, ours = build("qwen3", modules)
            change(ours)
            target = "all-linear" if modules == ("all-linear",) else list(modules)
            config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=target, lora_dropout=0.0, task_type="CAUSAL_LM")
            theirs = peft.get_peft_model(below("qwen3"), config)
            values = {f"base_model.model.{name}": p.detach() for name, p in ours.named_parameters() if is_adapter(name)}
            loaded = peft.set_peft_model_state_dict(theirs, values)
            assert not loaded.unexpected_keys
            assert not [key for key in loaded.missing_keys if "lora" in key]
            expected = theirs(input_ids=TOKENS, use_cache=False).logits
            found = ours(input_ids=TOKENS, use_cache=False).logits
            assert not torch.allclose(found, logits(below("qwen3")), atol=1e-3)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            for result in (found, expected):
                result.square().mean().backward()
            gradients = {
                name.removeprefix("base_model.model.").replace(".default", ""): p.grad
                for name, p in theirs.named_parameters()
                if p.requires_grad
            }
            trained = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
            assert trained.keys() == gradients.keys()
            for name, grad in gradients.items():
                torch.testing.assert_close(trained[name], grad, atol=1e-6, rtol=1e-4)


def test_an_export_is_read_by_transformers_and_by_peft(subtests, tmp_path):
    for number, name in enumerate(["qwen3-tied", "deepseek-v3"]):
        with subtests.test(name=name):
            folder = tmp_path / str(number)
            folder.mkdir()
            modules = ("q_proj", "o_proj")
            model, module = build(name, modules)
            change(module)
            model.export(module, folder / "merged")
            assert len({path.stat().st_mode for path in (folder / "merged").rglob("*.*")}) == 1
            expected = logits(module)
            merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
            torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)
            base = below(name)
            base.save_pretrained(folder / "base")
            plain = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
            adapted = peft.PeftModel.from_pretrained(plain, folder / "merged" / "adapter").eval()
            torch.testing.assert_close(logits(adapted), expected, atol=1e-5, rtol=1e-5)
            assert len(peft.get_peft_model_state_dict(adapted)) == 2 * len(list(adapters_of(module)))
            # No checkpoint had the adapters: they keep their dtype unless told otherwise.
            model.config.dtype = torch.bfloat16
            for asked in (None, torch.float16):
                written = model.export(module, folder / str(asked), dtype=asked)
                adapters = load_file(folder / str(asked) / "adapter" / "adapter_model.safetensors").values()
                assert written[0] == (asked or torch.bfloat16)
                assert {each.dtype for each in adapters} == {asked or torch.float32}


def test_what_peft_takes_for_experts_is_said(tmp_path, caplog):
    model, module = build("deepseek-v3", ("q_proj", "down_proj"))
    with caplog.at_level("WARNING"):
        model.export(module, tmp_path / "merged")
    assert "peft takes adapters of down_proj for those of the experts" in caplog.text


def test_a_model_without_adapters_exports_none(tmp_path):
    model = family("hf", CONFIGS["llama"])()
    model.text.tokenizer = Wordless()
    model.export(below("llama"), tmp_path / "plain")
    assert not (tmp_path / "plain" / "adapter").exists()


def test_the_start_depends_on_the_seed_alone():
    def drawn(seed, modules=MODULES):
        return {name: p.detach() for name, p in build("llama", modules, seed)[1].named_parameters() if is_adapter(name)}

    first, again, other = drawn(5), drawn(5, ("q_proj",)), drawn(6)
    assert all(torch.equal(first[name], tensor) for name, tensor in again.items())
    downs = [name for name in first if name.endswith("lora_A.weight")]
    assert not any(torch.equal(first[name], other[name]) for name in downs)
    assert len({float(first[name].sum()) for name in downs}) == len(downs), "each has values of its own"
    assert all(0.9 < first[name].abs().max() * first[name].shape[1] ** 0.5 <= 1.0 for name in downs)
    assert all(not first[name].any() for name in first.keys() - set(downs))


def test_learning_lowers_the_loss():
    settings = PolicyConfig(precision="fp32", micro_batch_units=256, lora=LoraConfig(rank=4, alpha=64.0))
    trainer = make_trainer(family("hf", CONFIGS["llama"])(), settings, single_world())
    losses = [train_step(trainer, text_payloads()).sums["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1
