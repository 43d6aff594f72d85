import attrs
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from cosmos_core.config.schema import LoraConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from cosmos_core.errors import TrainingError
from cosmos_core.policy.batches.batch import Share
from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.reader import restore
from cosmos_core.policy.checkpoints.saver import copy_state, write_checkpoint
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.pipeline import Forward
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.training.frozen import FrozenModel
from cosmos_core.policy.training.metrics import Measures, Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Loss
from cosmos_core.protocols.algorithm import Estimate
from cosmos_core.protocols.frozen import Divergence
from cosmos_core.protocols.model import Record
from cosmos_core.types import Array

TEMPERATURE = 0.7


def frozen_model(model, *, seed, role="reference", follows=False, layout=None):
    device = torch.device("cpu")
    return FrozenModel(
        role,
        model,
        lambda: model.build(seed=seed, dtype=torch.float32, device=device, layout=layout),
        policy=PolicyConfig(precision="fp32"),
        mesh=single_world().mesh,
        device=device,
        is_offloaded=True,
        follows=follows,
    )


def consulting(kit, divergence=None, role="reference"):
    """The policy's log-probs against the frozen model's, and the divergence from it."""

    @attrs.frozen(kw_only=True)
    class Consults(kit.Reinforce):
        skips_zero_advantage: bool = False
        consults: dict = attrs.field(factory=lambda: {role: divergence})

        def loss(self, decisions):
            self.seen.append(decisions)
            output = decisions.frozen[role]
            if divergence is not None:
                return Loss(loss_N=output.divergence_N)
            return Loss(loss_N=(output.logprobs_N - decisions.logprobs_N).square())

    return Consults()


def step(trainer, sequences, totals):
    held = []
    apply = trainer._apply
    trainer._apply = lambda *given: held.append(trainer._gradients.flat.clone()) or apply(*given)
    share = Share(sequences=tuple(sequences), counts=totals, temperatures=(TEMPERATURE,))
    applied = trainer.train(share, totals, solo(), Stopwatch(trainer.device))
    return held[0], applied.meter.report()


def drawn(kit, number=8):
    return [attrs.evolve(sequence, temperature=TEMPERATURE) for sequence in kit.random_sequences(number)]


def plain(model, kit, seed):
    """transformers' own module with the weights of a seed."""
    module = AutoModelForCausalLM.from_config(Qwen3Config(**kit.QWEN3))
    module.load_state_dict(model.build(seed=seed, dtype=torch.float32, device=kit.CPU).state_dict())
    return module.eval()


def logits(module, sequence):
    """transformers' own forward of one sequence: float64 log-probs [n, V] at the places that decide."""
    prompt, completion = (
        torch.frombuffer(bytearray(sequence.payload.arrays[name].data), dtype=torch.int32).long()
        for name in ("prompt", "completion")
    )
    found = module(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(found / TEMPERATURE, -1), completion


def test_the_reference_says_what_transformers_says_of_its_weights(model, kit):
    for budget in [20, 1000]:
        reference, sequences = frozen_model(model, seed=7), drawn(kit)
        algorithm = consulting(kit)
        trainer = kit.make_trainer(model, algorithm, frozen={"reference": reference}, micro_batch_units=budget)
        twin = plain(model, kit, 7)
        with torch.no_grad():
            expected = [rows.gather(-1, ids[:, None])[:, 0] for rows, ids in (logits(twin, each) for each in sequences)]
        step(trainer, sequences, kit.counts_of(sequences))
        found = torch.cat([decisions.frozen["reference"].logprobs_N for decisions in algorithm.seen])
        assert not found.requires_grad
        torch.testing.assert_close(
            found.sort().values.double(), torch.cat(expected).sort().values, rtol=1e-4, atol=1e-5
        )
        assert all(decisions.frozen["reference"].divergence_N is None for decisions in algorithm.seen)


def test_the_gradient_of_a_divergence_is_that_of_transformers_own_forwards(model, kit):
    for kind in ["reverse-kl", "forward-kl"]:
        sequences = drawn(kit)
        totals = kit.counts_of(sequences)
        divergence = Divergence(kind=kind)
        module, teacher = plain(model, kit, 0), plain(model, kit, 7).requires_grad_(False)
        total = torch.zeros((), dtype=torch.float64)
        for sequence in sequences:
            ours, theirs = logits(module, sequence)[0], logits(teacher, sequence)[0]
            p, q = (ours, theirs) if kind == "reverse-kl" else (theirs, ours)
            total = total + (p.exp() * (p - q)).sum() / totals.decisions
        total.backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        flats = []
        for budget in (20, 1000):
            algorithm = consulting(kit, divergence, role="teacher")
            frozen = {"teacher": frozen_model(model, seed=7, role="teacher")}
            trainer = kit.make_trainer(model, algorithm, frozen=frozen, micro_batch_units=budget)
            flat, metrics = step(trainer, sequences, totals)
            assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
            flats.append(flat)
        torch.testing.assert_close(flats[0], flats[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(flats[0], expected, rtol=1e-3, atol=1e-5)


def test_forwards_of_frozen_models_are_progress(model, kit):
    reference, sequences = frozen_model(model, seed=7), drawn(kit)
    trainer = kit.make_trainer(model, frozen={"reference": reference})
    payloads = [sequence.payload for sequence in sequences]
    before = trainer.activity.pulse().progress
    packing = {"budget": 20, "multiple": 1, "is_uniform": False}
    reference.evaluate(model.pack(payloads, **packing), payloads, packing, Forward(temperature=1.0))
    assert trainer.activity.pulse().progress > before


def check_a_model_with_weights_of_its_own_does_not_repeat_what_the_policys_forwards_did(model, kit, follows):
    packed = []

    class Repeating:
        def __getattr__(self, name):
            return getattr(model, name)

        def records(self):
            return (Record(name="experts", dtype="int16", shape=(2, 1), option="model.options.router_replay"),)

        def record(self, module):
            raise AssertionError

        counters = after_step = record

        def pack(self, payloads, **packing):
            packed.append(payloads)
            return model.pack(payloads, **packing)

    experts = Array(dtype="int16", shape=(0, 2, 1), data=b"")
    sequences = [
        attrs.evolve(each, payload=attrs.evolve(each.payload, arrays={**each.payload.arrays, "experts": experts}))
        for each in drawn(kit)
    ]
    reference = frozen_model(Repeating(), seed=0, follows=follows)
    trainer = kit.make_trainer(model, consulting(kit), frozen={"reference": reference})
    step(trainer, sequences, kit.counts_of(sequences))
    payloads = packed[0]
    own = {"prompt", "completion"}
    assert {*payloads[0].arrays} == (own | {"logprobs", "versions", "experts"} if follows else own)


def test_a_model_with_weights_of_its_own_does_not_repeat_what_the_policys_forwards_did(model, kit):
    for follows in [False, True]:
        check_a_model_with_weights_of_its_own_does_not_repeat_what_the_policys_forwards_did(model, kit, follows)


def test_a_frozen_model_that_counts_units_otherwise_is_refused(model, kit):
    other = frozen_model(model, seed=7)

    class Otherwise:
        def __getattr__(self, name):
            return getattr(model, name)

        def pack(self, payloads, **packing):
            return [attrs.evolve(batch, sequences=batch.sequences[::-1]) for batch in model.pack(payloads, **packing)]

    other._model = Otherwise()
    sequences = drawn(kit)
    trainer = kit.make_trainer(model, consulting(kit), frozen={"reference": other})
    with pytest.raises(TrainingError, match=r"\[reference\]: its model packs sequences \(\d"):
        step(trainer, sequences, kit.counts_of(sequences))


def estimating(kit, batches):
    """The advantage of each decision: minus its sequence's part of all log-probs."""

    @attrs.frozen(kw_only=True)
    class Estimates(kit.Reinforce):
        old_logprobs: str = "recompute"
        skips_zero_advantage: bool = False

        def summarise(self, taken):
            return [float(taken.logprobs_n.sum()), taken.advantage]

        def settle(self, batch):
            batches.append(batch)
            return lambda taken: self.estimate(taken, batch)

        def estimate(self, taken, batch):
            share = batch[taken.place][0] / sum(total for total, _ in batch.values())
            return Estimate(
                advantages_n=torch.full_like(taken.logprobs_n, share),
                targets_n=taken.logprobs_n,
                metrics={"share": share},
            )

        def loss(self, decisions):
            return Loss(
                loss_N=-decisions.advantages_N * decisions.logprobs_N,
                metrics={"off": (decisions.targets_N - decisions.logprobs_N.detach()).abs()},
            )

    return Estimates()


def test_estimates_know_the_whole_batch_whatever_the_micro_batches(model, kit):
    sequences = drawn(kit)
    totals = kit.counts_of(sequences)
    results = []
    for budget in (20, 1000):
        batches = []
        trainer = kit.make_trainer(model, estimating(kit, batches), micro_batch_units=budget)
        results.append(step(trainer, sequences[::-1], totals))
        # Settled once, and in the order of places wherever sequences lie.
        (batch,) = batches
        assert [*batch] == [*range(len(sequences))]
        assert [advantage for _, advantage in batch.values()] == [each.advantage for each in sequences]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for _, metrics in results:
        # A mean over sequences, not over decisions.
        assert metrics["share"] == pytest.approx(1 / len(sequences), rel=1e-6)
        assert metrics["off"] == pytest.approx(0.0, abs=1e-6)


def test_a_process_without_the_last_stage_estimates_nothing(model, kit):
    """Even where nothing is evaluated before: its sequences are told of, and measured, by the one that has it."""
    batches = []
    algorithm = attrs.evolve(estimating(kit, batches), old_logprobs="behaviour")
    trainer = kit.make_trainer(model, algorithm)

    class Early:
        concludes = False

        def train(self, batches, *asked):
            pass

    trainer._executor = Early()
    sequences = drawn(kit)
    _, metrics = step(trainer, sequences, kit.counts_of(sequences))
    assert batches == []
    assert "share" not in metrics


def test_estimates_are_measured_where_no_loss_is():
    measures = Measures()
    measures.take_estimates([Estimate(advantages_n=torch.zeros(1), metrics={"share": value}) for value in (1.0, 2.0)])
    assert measures.meter().report() == {"share": 1.5}


def test_targets_of_some_sequences_are_refused(model, kit):
    algorithm = estimating(kit, [])

    class Some(type(algorithm)):
        def estimate(self, taken, batch):
            found = super().estimate(taken, batch)
            return attrs.evolve(found, targets_n=None) if taken.place == 3 else found

    sequences = drawn(kit)
    with pytest.raises(TrainingError, match="gave targets_n for some sequences of the step and None for others"):
        step(kit.make_trainer(model, Some(), micro_batch_units=20), sequences, kit.counts_of(sequences))


def test_an_estimate_of_another_length_is_refused(model, kit):
    algorithm = estimating(kit, [])

    class Short(type(algorithm)):
        def estimate(self, taken, batch):
            return Estimate(advantages_n=torch.zeros(1))

    sequences = drawn(kit)
    with pytest.raises(TrainingError, match=r"advantages_n of shape \(1,\) for a sequence of \d+ decisions"):
        step(kit.make_trainer(model, Short()), sequences, kit.counts_of(sequences))


def test_a_reference_without_a_checkpoint_is_what_its_stage_starts_from(model, kit, tmp_path):
    sequences = drawn(kit)
    reference = frozen_model(model, seed=0, follows=True)
    trainer = kit.make_trainer(model, frozen={"reference": reference})
    assert not any(name.startswith("reference.") for name in trainer.state())
    step(trainer, sequences, kit.counts_of(sequences))
    begun = {name: tensor.clone() for name, tensor in trainer.module.named_parameters()}
    second = kit.stage_of(OptimizerConfig(lr=1e-2), index=1, first_step=1)
    trainer.begin_stage(second, kit.Reinforce(), 1.0)
    step(trainer, sequences, kit.counts_of(sequences))
    for name, parameter in reference._module.named_parameters():
        assert torch.equal(parameter, begun[name])
        assert not torch.equal(parameter, trainer.module.get_parameter(name))
    place = Place(run_id="run", step=2, stage=1, nonfinite_steps=0)
    path = write_checkpoint(str(tmp_path), copy_state(trainer.state(), place))
    again = frozen_model(model, seed=3, follows=True)
    fresh = kit.make_trainer(model, seed=5, frozen={"reference": again})
    restore(fresh, path, lambda index: fresh.begin_stage(second, consulting(kit), 1.0))
    for name, parameter in again._module.named_parameters():
        assert torch.equal(parameter, begun[name])


def test_a_reference_with_adapters_is_the_same_once_the_run_is_resumed(model, kit, tmp_path):
    """What lies below adapters never changes, but the adapters of the warm-up are the reference's, too."""
    policy = PolicyConfig(precision="fp32", parallel=ParallelConfig(compile="off"), lora=LoraConfig(rank=2))
    layout = layout_of(policy, single_world().mesh, "cpu")
    second = kit.stage_of(OptimizerConfig(lr=1e-2), index=1, first_step=1)

    def begun():
        reference = frozen_model(model, seed=0, follows=True, layout=layout)
        trainer = Trainer(
            model=model,
            module=model.build(seed=0, dtype=torch.float32, device=kit.CPU, layout=layout),
            policy=policy,
            device=kit.CPU,
            world=single_world(),
            frozen={"reference": reference},
        )
        trainer.begin_stage(kit.stage_of(), kit.Reinforce(), 1.0)
        return trainer, reference

    sequences = drawn(kit)
    trainer, reference = begun()
    step(trainer, sequences, kit.counts_of(sequences))
    trainer.begin_stage(second, kit.Reinforce(), 1.0)
    saved = {name for name in trainer.state() if name.startswith("reference.")}
    assert saved == {name.replace("model.", "reference.", 1) for name in trainer.state() if name.startswith("model.")}
    assert saved
    step(trainer, sequences, kit.counts_of(sequences))
    place = Place(run_id="run", step=2, stage=1, nonfinite_steps=0)
    path = write_checkpoint(str(tmp_path), copy_state(trainer.state(), place))
    fresh, again = begun()
    restore(fresh, path, lambda index: fresh.begin_stage(second, kit.Reinforce(), 1.0))
    for name, parameter in again._module.named_parameters():
        assert torch.equal(parameter, reference._module.get_parameter(name)), name


def test_a_run_that_goes_back_to_its_first_stage_has_its_first_reference_again(model, kit):
    reference = frozen_model(model, seed=0, follows=True)
    begun = {name: tensor.clone() for name, tensor in reference._module.named_parameters()}
    trainer = kit.make_trainer(model, frozen={"reference": reference})
    sequences, first = drawn(kit), trainer.stage
    step(trainer, sequences, kit.counts_of(sequences))
    trainer.begin_stage(kit.stage_of(index=1, first_step=1), kit.Reinforce(), 1.0)
    trainer.begin_stage(first, kit.Reinforce(), 1.0)
    assert all(torch.equal(tensor, begun[name]) for name, tensor in reference._module.named_parameters())
