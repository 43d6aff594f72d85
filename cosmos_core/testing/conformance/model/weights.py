"""Tests of the weights: how they are built, described, published, trained and exported."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from cosmos_core.config.schema import PolicyConfig
from cosmos_core.errors import CheckpointError, UntriedError
from cosmos_core.models.tokens import KIND, values
from cosmos_core.policy.processes.world import single_world
from cosmos_core.protocols import ModelFacts
from cosmos_core.protocols.model import TriedModel
from cosmos_core.testing.conformance.model.subject import ROOM, SEED, Subject, contents, copied, first_difference
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import CPU, make_trainer, train_step
from cosmos_core.weights.shards import canonical_tensors

_CODE: Final = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
"""File names that say pickle: reading one may run what it holds."""


class WeightTests:
    """Tests of `build`, `facts` and `export`."""

    def test_the_seed_alone_decides_the_weights(self, subject: Subject) -> None:
        """Every replica starts from the same weights, in the dtype asked for, and in memory of its own."""
        first = copied(subject.module)
        torch.rand(3)
        before = torch.get_rng_state()
        other = subject.build()
        is_touched = not torch.equal(torch.get_rng_state(), before)
        if name := first_difference(first, copied(other)):
            fault(f"build(seed={SEED}) gives other weights the second time: {name}; draw from `seed` alone")
        if is_touched:
            fault("build() changes torch's global random state; draw under torch.random.fork_rng()")
        held = {each.data_ptr(): name for name, each in canonical_tensors(subject.module).items() if each.numel()}
        shared = [held[each.data_ptr()] for each in canonical_tensors(other).values() if each.data_ptr() in held]
        if shared:
            fault(f"build() gave weights that an earlier module holds: {', '.join(shared[:3])}; make new ones")
        # Those of a checkpoint are not drawn.
        if subject.maker.context.path is None and not first_difference(first, copied(subject.build(SEED + 1))):
            fault(f"build(seed={SEED}) and build(seed={SEED + 1}) give the same weights; draw them from `seed`")
        for dtype in (torch.float32, torch.bfloat16):
            for name, each in subject.build(dtype=dtype).named_parameters():
                if each.device != CPU or (each.is_floating_point() and each.dtype != dtype):
                    fault(f"build(dtype={dtype}) made {name} as {each.dtype} on {each.device}; cast the whole module")

    def test_facts_are_those_of_the_module(self, subject: Subject) -> None:
        """Planning and engines go by them, on a machine that could not hold the weights."""
        facts, tensors = _facts_without_building(subject), canonical_tensors(subject.module)
        if facts != subject.maker().facts() or facts != subject.model.facts():
            fault(f"facts() differ between two instances or two calls: {facts}")
        if not facts.architecture or facts.context_length < 1:
            fault(f"facts() name no architecture or no context: {facts}; context_length counts the prompt too")
        if facts.num_parameters != (counted := sum(parameter.numel() for parameter in subject.module.parameters())):
            fault(
                f"facts() say {facts.num_parameters:,} parameters, build() {counted:,} (tied parameters counted once)"
            )
        for name, shape in facts.matrices.items():
            found = f"a tensor of shape {tuple(tensors[name].shape)}" if name in tensors else "no such tensor"
            if found != f"a tensor of shape {tuple(shape)}" or len(shape) < 2:
                fault(f"facts().matrices has {name!r} {shape}, and the module has {found}; name [..., rows, columns]")
        if any(payload.kind == KIND for payload in subject.payloads):
            _check_ids(subject, facts)

    def test_the_published_tensors_are_the_whole_model(self, subject: Subject) -> None:
        """A rollout replica that loads them must say what the trainer says."""
        trained, replica = subject.other_weights(), subject.build()
        places, sent = canonical_tensors(replica), canonical_tensors(trained)
        if places.keys() != sent.keys():
            fault(f"two modules of one model have other tensors: {', '.join(sorted(places.keys() ^ sent.keys())[:5])}")
        for number, place in enumerate(places.values()):
            place.fill_(number)
        if shared := [name for number, (name, place) in enumerate(places.items()) if bool((place != number).any())]:
            fault(f"{shared[0]} and others share memory, so the shard map covers it twice; tie one Parameter, no view")
        for name, tensor in sent.items():
            places[name].copy_(tensor)
        if not _say_the_same(subject, trained, subject, replica):
            fault(
                "a module that was given every published tensor gives other log-probs: weights lie outside its "
                "parameters and persistent buffers; register them with register_parameter or register_buffer"
            )

    def test_training_changes_every_published_parameter(self, subject: Subject) -> None:
        """Imitating the payloads through the trainer makes them likelier, and reaches all that is published."""
        policy = PolicyConfig(precision="fp32", micro_batch_units=ROOM)
        trainer = make_trainer(subject.model, policy, single_world(), seed=SEED)
        before = copied(trainer.module)
        losses = [train_step(trainer, subject.payloads).report()["loss"] for _ in range(4)]
        after = canonical_tensors(trainer.module)
        trained = [name for name, parameter in trainer.module.named_parameters() if parameter.requires_grad]
        if still := [name for name in trained if torch.equal(after[name], before[name])]:
            fault(f"training left {len(still)} trainable parameters as they were: {', '.join(still[:5])}")
        if not losses[-1] < losses[0]:
            fault(f"imitating the payloads did not make them likelier: losses of the steps were {losses}")

    def test_the_exported_model_is_the_same_model(self, subject: Subject, tmp_path: Path) -> None:
        """Another library finds what was trained, bit for bit, and a run goes on from it as from any checkpoint."""
        module, folder = subject.other_weights(), tmp_path / "exported"
        subject.export(module, folder, torch.float32)
        if unsafe := sorted(path.name for path in folder.rglob("*") if path.suffix in _CODE):
            fault(f"export() wrote {', '.join(unsafe)}, which may hold pickles; write safetensors")
        found = subject.kit.load_exported(folder)
        for name, tensor in canonical_tensors(module).items():
            if name not in found:
                fault(f"the exported folder has no tensor {name}, a canonical name, as its public library reads it")
            if not torch.equal(found[name], tensor):
                fault(f"the exported {name} is not that of the module that export() was given, as trained; write that")
        again = subject.from_folder(folder)
        if different := first_difference(copied(module), copied(again.module)):
            fault(f"a model from the exported folder has other weights: {different}")
        if not _say_the_same(subject, module, again, again.module):
            fault("a model from the exported folder gives other log-probs, though its weights are the same")
        for prompt in subject.prompts:
            if contents(again.model.encode(prompt)) != contents(subject.model.encode(prompt)):
                fault(f"a model from the exported folder encodes {prompt.text!r} differently; export the tokenizer too")
        if again.facts != subject.facts:
            fault(f"a model from the exported folder has other facts: {again.facts}, not {subject.facts}")

    def test_an_export_has_the_dtype_asked_for_or_the_checkpoints(self, subject: Subject, tmp_path: Path) -> None:
        """Weights that came in 16 bits are not written in 32, and none becomes infinite in those that are asked for."""
        module, folder, asked = subject.other_weights(), tmp_path / "halved", torch.bfloat16
        said = tuple(subject.export(module, folder, asked))
        if said[:1] != (asked,):
            fault(f"export(dtype={asked}) returns {said}; return the dtypes written, that of most values first")
        found = subject.kit.load_exported(folder)
        for name, tensor in canonical_tensors(module).items():
            # A library may read them into float32.
            if not any(torch.equal(found[name].double(), tensor.to(dtype).double()) for dtype in said):
                fault(f"export(dtype={asked}) wrote {name} other than rounded to one of {said}, which it returns")
        again = subject.from_folder(folder)
        if (kept := tuple(again.export(again.module, tmp_path / "again"))) != said:
            fault(f"of a checkpoint in {said}, export() without a dtype writes {kept}; write what it came in")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2.0**30)
        try:
            subject.export(module, tmp_path / "infinite", torch.float16)
        except CheckpointError:
            return
        fault("export(dtype=torch.float16) makes values beyond its range infinite; raise CheckpointError for them")


def _facts_without_building(subject: Subject) -> ModelFacts:
    allocated: list[str] = []

    def note(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        # A FakeTensor names a device, and has no storage there.
        if parameter is not None and parameter.device.type != "meta" and not isinstance(parameter, FakeTensor):
            allocated.append(f"{type(module).__name__}.{name}")

    handle = register_module_parameter_registration_hook(note)
    try:
        facts = subject.model.facts()
    finally:
        handle.remove()
    # One that tries a small model of its make draws the weights of that.
    tries = False
    if isinstance(subject.model, TriedModel):
        with contextlib.suppress(UntriedError):
            tries = subject.model.trial(num_layers=1) is not None
    if allocated and not tries:
        fault(f"facts() allocates weights ({allocated[0]} first); count them on the meta device, or by arithmetic")
    return facts


def _check_ids(subject: Subject, facts: ModelFacts) -> None:
    """Each token id has a row in the embedding, beyond which an id reads past the end of a table."""
    tokens = [payload for payload in subject.payloads if payload.kind == KIND]
    used = {int(id_) for payload in tokens for name in ("prompt", "completion") for id_ in values(payload, name)}
    if not facts.stop_ids or not facts.tokenizer_size:
        fault("facts().stop_ids is empty, or tokenizer_size 0: no completion would ever end before the longest length")
    if foreign := sorted(id_ for id_ in {*used, *facts.stop_ids, facts.pad_id} if not 0 <= id_ < facts.tokenizer_size):
        fault(
            f"demonstrations, or the stop or pad ids of facts(), have ids {foreign[:5]}, and facts().tokenizer_size is "
            f"{facts.tokenizer_size}; give the largest id of the tokenizer plus one"
        )
    find = getattr(subject.module, "get_input_embeddings", None)
    rows = max(facts.vocab_size, facts.tokenizer_size) if find is None else find().weight.shape[0]
    if not facts.tokenizer_size <= facts.vocab_size == rows:
        fault(
            f"facts().vocab_size is {facts.vocab_size}, and the embedding has {rows} rows for the "
            f"{facts.tokenizer_size} ids of the tokenizer; give the rows of build()"
        )


def _say_the_same(one: Subject, module: torch.nn.Module, other: Subject, rebuilt: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.logprobs(module), other.logprobs(rebuilt)))
