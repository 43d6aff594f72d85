import re

import attrs
import pytest

from cosmos_core.config.job import stages
from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    EnvironmentCapabilities,
    ModelCapabilities,
    ModelFacts,
    Preflight,
    RewardCapabilities,
)
from cosmos_core.protocols.facts import Extent
from cosmos_core.protocols.frozen import Divergence
from cosmos_core.protocols.model import Record
from cosmos_core.rollout.embedded import plugin as embedded
from cosmos_core.run.planning.checks import placement_misfits, problems
from cosmos_core.run.planning.footprint import reference_bytes
from cosmos_core.run.planning.frozen import FrozenFacts
from cosmos_core.run.planning.parts import Measured, Parts
from cosmos_core.run.planning.preflight import check_gpus, check_present

RECIPE = {
    "run": {"name": "demo", "steps": 6},
    "model": {"plugin": "hf", "config": {"model_type": "qwen3"}},
    "algorithm": {"plugin": "grpo"},
    "policy": {"optimizer": {"lr": 1e-6}},
    "dataset": {"plugin": "numbers"},
    "reward": [{"plugin": "right"}],
    "warmup": {"optimizer": {"lr": 1e-6}, "plugin": "sft", "steps": 3},
    "rollout": {"sampling": {"max_units": 100}},
}
FACTS = ModelFacts(
    architecture="Tiny",
    num_parameters=1000,
    num_layers=2,
    hidden_size=8,
    vocab_size=300,
    tokenizer_size=300,
    context_length=256,
    stop_ids=frozenset({2}),
    pad_id=0,
)


def parts_of(changes=None, *, warmup=None, main=None, **parts):
    recipe = recipe_from({**RECIPE, **(changes or {})})
    capabilities = [
        warmup or AlgorithmCapabilities(source="demonstrations"),
        main or AlgorithmCapabilities(min_group_size=2),
    ]
    whole = Parts(
        model=ModelCapabilities(),
        facts=FACTS,
        dataset=DatasetCapabilities(demonstrations=True),
        stages=list(zip(stages(recipe), capabilities[-len(stages(recipe)) :], strict=True)),
        rewards=[RewardCapabilities() for _ in recipe.reward],
        engine=EngineCapabilities(),
        num_train_rows=10,
        num_heldout_rows=10,
        measured=Measured(num_rows=10, num_demonstrations=10, shortest_prompt=9, longest_prompt=20),
    )
    return attrs.evolve(whole, **parts)


def check(changes=None, **parts):
    return problems(recipe_from({**RECIPE, **(changes or {})}), parts_of(changes, **parts))


def rollout(**changes):
    return {"rollout": {**RECIPE["rollout"], **changes}}


def test_what_can_run_has_no_problems():
    # A recipe that fits has no problems.
    assert check() == []

    # Raw logprobs are fine where nothing changes them.
    assert check({}, engine=EngineCapabilities(logprob_semantics="raw")) == []

    # A cut distribution is one of tokens.
    latents = EngineCapabilities(payload_kinds=frozenset({"latents"}))
    found = check(rollout(sampling={"top_p": 0.9}), engine=latents)
    assert not any("vocabulary" in problem for problem in found)

    # A supervised run needs neither engine nor rewards.
    supervised = AlgorithmCapabilities(source="demonstrations")
    changes = {"reward": [], "rollout": {"group_size": 1, "sampling": {"top_p": 0.5, "max_units": 4096}}}
    assert check(changes, main=supervised, engine=None) == []


def test_pools_that_cannot_share_gpus_are_refused():
    able = EngineCapabilities(sleeps=True)

    def found(engine=able, colocates=True, **changes):
        recipe = recipe_from({**RECIPE, **rollout(placement="colocated"), **changes})
        return "\n".join(placement_misfits(recipe, engine, colocates=colocates))

    assert found() == ""
    assert "and nothing generates in this run" in found(engine=None)
    assert "'embedded' cannot (EngineCapabilities.sleeps)" in found(engine=EngineCapabilities())
    assert "launcher 'local' gives each process GPUs of its own (LauncherCapabilities.colocates)" in found(
        colocates=False
    )
    assert "sync.transport 'nccl' cannot" in found(sync={"transport": "nccl"})
    assert "policy.device is 'auto', rollout.device 'cpu'" in found(**rollout(placement="colocated", device="cpu"))
    many = rollout(placement="colocated", replicas=2, mesh={"tp": 2})
    assert "make 4 processes, each on the GPU of one of the policy's 1;" in found(**many)


CANNOT_RUN = [
    ({}, {"facts": attrs.evolve(FACTS, tokenizer_size=301)}, "model: the vocabulary has 300 entries.*up to 300"),
    ({"evaluation": {"interval": 5}}, {"num_heldout_rows": 0}, "evaluation.interval: 5.*no held-out rows"),
    (
        {"evaluation": {"interval": 5}, "dataset": {"plugin": "/a/ds.py:rows"}},
        {"num_heldout_rows": 0},
        r"dataset 'rows' has no held-out rows; hold some out by dataset\.options\.heldout_rows, or set evaluation",
    ),
    (rollout(sampling={"max_units": 256}), {}, "rollout.sampling.max_units: 256 leaves no room.*256"),
    ({"evaluation": {"max_units": 300}}, {}, "evaluation.max_units: 300 leaves no room"),
    (
        {"policy": {"optimizer": {"lr": 1e-6}, "micro_batch_units": 119}},
        {},
        "policy.micro_batch_units: 119.*raise it to 120",
    ),
    ({"reward": []}, {}, "reward: 'grpo' learns from rewards"),
    (rollout(group_size=1), {}, "rollout.group_size: 1.*at least 2"),
    ({}, {"dataset": DatasetCapabilities()}, "warmup.plugin: 'sft' learns from demonstrations.*have none"),
    ({}, {"warmup": AlgorithmCapabilities()}, "warmup.plugin: 'sft' learns from rollouts"),
    (rollout(sampling={"top_p": 0.9}), {}, "rollout.sampling: top_p = 0.9, top_k = 0 draw from a cut"),
    (rollout(sampling={"top_k": 5}), {}, "rollout.sampling: top_p = 1.0, top_k = 5 draw from a cut"),
    (
        rollout(sampling={"temperature": 0.7}),
        {"engine": EngineCapabilities(logprob_semantics="raw")},
        "gives raw log-probs, but algorithm 'grpo' can only use processed",
    ),
    (
        {},
        {"engine": EngineCapabilities(payload_kinds=frozenset({"latents"}))},
        "makes payloads of kind latents, but model 'hf' takes tokens; they do not go together, so take another of",
    ),
    (
        {"policy": {"optimizer": {"lr": 1e-6, "kind": "adamw-8bit"}}},
        {},
        r"policy.optimizer.kind: 'adamw-8bit' is torchao.s, which is not installed; pip install .cosmos-core\[",
    ),
    (
        {},
        {"rewards": [RewardCapabilities(payload_kinds=frozenset({"media"}))]},
        "but reward 'right' takes media",
    ),
]
"""Changes of the recipe, what else there is, and what is said."""


def test_what_cannot_run_is_named_with_its_key(monkeypatch):
    monkeypatch.setattr("cosmos_core.run.planning.checks.find_spec", lambda name: None)
    for changes, options, expected in CANNOT_RUN:
        found = check(changes, **options)
        assert any(re.search(expected, problem) for problem in found), found

    # Every problem is found at once.
    found = check(rollout(group_size=1, sampling={"max_units": 999}), dataset=DatasetCapabilities())
    assert len(found) == 3

    # What the engines preflight says is told with the rest.
    preflight = Preflight(problems=("rollout.precision: no",))
    found = check({"reward": []}, preflight=preflight)
    assert found[-1] == "rollout.precision: no"
    assert len(found) > 1

    # So is a cache that does not hold the longest sequence.
    (problem,) = check({}, preflight=Preflight(cache_bytes=1000, cache_key="engine.cache"))
    assert problem.startswith("engine.cache: 9.31e-07 GiB do not hold one sequence at its longest, which needs ")

    # A mesh that does not fit the model is refused.
    (problem,) = check({"policy": {"optimizer": {"lr": 1e-6}, "mesh": {"tp": 2}}})
    assert problem.startswith("policy.mesh.tp: 2, but the model's plugin does not declare")


def test_rows_have_to_be_usable_and_have_what_is_learned():
    # A warm up on rows without demonstrations is refused.
    measured = Measured(num_rows=64, num_demonstrations=0, shortest_prompt=9, longest_prompt=20)
    (found,) = check(measured=measured)
    assert "warmup.plugin: 'sft'" in found
    assert "none of 64 train rows of dataset 'numbers' has one" in found

    # A dataset of which no row can be used says why.
    measured = Measured(
        num_rows=10, num_demonstrations=0, shortest_prompt=0, longest_prompt=0, num_unusable=10, fault="no template"
    )
    (problem,) = check(measured=measured)
    assert problem.endswith("10 train rows of 'numbers' that were looked at can be used; the first: no template")
    assert check(measured=attrs.evolve(measured, num_unusable=9, num_demonstrations=1)) == []

    # A held out loss needs held out demonstrations.
    measured = Measured(num_rows=10, num_demonstrations=10, shortest_prompt=9, longest_prompt=20, num_heldout=7)
    main = AlgorithmCapabilities(source="demonstrations")
    alone = {"reward": [], "warmup": None}
    (problem,) = check(alone, main=main, engine=None, measured=measured)
    assert problem.startswith("evaluation.prompts: without rewards")
    assert "first 7 held-out rows of dataset 'numbers'" in problem
    some = attrs.evolve(measured, num_heldout_demonstrations=1)
    assert check(alone, main=main, engine=None, measured=some) == []
    assert check(measured=measured) == []
    nothing = attrs.evolve(measured, num_heldout=0)
    assert check(alone, main=main, engine=None, measured=nothing) == []

    # An evaluation without held out rows is refused if it was asked for.
    main = AlgorithmCapabilities(source="demonstrations")
    alone = {"reward": [], "warmup": None, "evaluation": {"interval": 5}}
    (problem,) = check(alone, main=main, engine=None, num_heldout_rows=0)
    assert "evaluation.interval: 5" in problem


def test_lengths_that_leave_no_room_are_refused():
    # Prompts of which none fits the context are refused.
    measured = Measured(num_rows=64, num_demonstrations=64, shortest_prompt=200, longest_prompt=300)
    (found,) = check(measured=measured)
    assert "no prompt fits: the shortest of 64 has 200 units, with a completion of up to 100" in found

    # Demonstrations of which none fits a forward are refused.
    main = AlgorithmCapabilities(source="demonstrations")
    alone = {"reward": [], "warmup": None, "policy": {"optimizer": {"lr": 1e-6}, "micro_batch_units": 9}}
    (problem,) = check(alone, main=main, engine=None)
    assert problem.startswith("policy.micro_batch_units: no demonstration fits: the shortest of 10 prompts has 9 units")
    assert (
        check({**alone, "policy": {"optimizer": {"lr": 1e-6}, "micro_batch_units": 10}}, main=main, engine=None) == []
    )


def test_an_engine_takes_media_and_records_what_is_trained_on():
    # Prompts with media need an engine that takes them.
    measured = Measured(num_rows=64, num_demonstrations=64, shortest_prompt=9, longest_prompt=20, num_with_media=3)
    (found,) = check({}, measured=measured)
    assert "takes prompts of text only, and 3 of 64 train rows of dataset 'numbers' show images or videos" in found
    assert check({}, measured=measured, engine=EngineCapabilities(media=True)) == []

    # What a model trains on needs an engine that records it.
    records = (Record(name="paths", dtype="int16", shape=(2,), option="model.options.replay"),)
    (found,) = check(records=records)
    assert found == (
        "rollout.engine.plugin: 'embedded' does not record what the model's forwards do, and model.options.replay "
        "trains on its record 'paths'; use an engine that records, such as 'embedded', or leave "
        "model.options.replay out"
    )
    assert check(records=records, engine=EngineCapabilities(records=True)) == []
    demonstrations = AlgorithmCapabilities(source="demonstrations")
    (found,) = check({"warmup": None}, main=demonstrations, records=records)
    assert found.startswith("model.options.replay: it trains on what forwards record while completions are generated")


def test_processes_have_a_gpu_and_sequences_each(monkeypatch):
    # Processes of a replica do not share a gpu.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match=r"policy.mesh: 4 processes .* need a GPU each, and this machine has 2"):
        check_gpus(recipe_from({**RECIPE, "policy": {"optimizer": {"lr": 1e-6}, "mesh": {"dp_shard": 4}}}))
    check_gpus(recipe_from({**RECIPE, "policy": {"optimizer": {"lr": 1e-6}, "mesh": {"dp_shard": 2}}}))
    check_gpus(recipe_from({**RECIPE, "policy": {"optimizer": {"lr": 1e-6}, "mesh": {"dp_shard": 4}, "device": "cpu"}}))
    replicas = {"optimizer": {"lr": 1e-6}, "replicas": 3}
    with pytest.raises(ConfigError, match=r"policy.mesh: 3 · 1 processes .* need a GPU each, and this machine has 2"):
        check_gpus(recipe_from({**RECIPE, "policy": replicas}))
    check_gpus(recipe_from({**RECIPE, "policy": {**replicas, "replicas": 2}}))
    with pytest.raises(ConfigError, match=r"rollout.mesh: 4 processes .*or rollout.device = 'cpu'"):
        check_gpus(recipe_from({**RECIPE, **rollout(mesh={"tp": 4})}))
    check_gpus(recipe_from({**RECIPE, **rollout(mesh={"tp": 4}, device="cpu")}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpus(recipe_from({**RECIPE, "policy": {"optimizer": {"lr": 1e-6}, "mesh": {"dp_shard": 4}}}))

    # Processes that no sequence is left for are refused.
    axes = ModelCapabilities(mesh_axes=frozenset({"dp_shard"}))
    policy = {"optimizer": {"lr": 1e-6}, "prompts_per_step": 4, "mesh": {"dp_shard": 32}}
    (idle,) = check({"policy": policy, "rollout": {**RECIPE["rollout"], "group_size": 4}, "warmup": None}, model=axes)
    assert idle.startswith("policy.prompts_per_step: 16 sequences a step cannot be shared")
    assert "= 32 processes; raise it to at least 8" in idle
    assert (
        check(
            {
                "policy": {**policy, "prompts_per_step": 8},
                "rollout": {**RECIPE["rollout"], "group_size": 4},
                "warmup": None,
            },
            model=axes,
        )
        == []
    )


def test_a_format_needs_an_engine_a_model_and_a_layout_that_have_it():
    # A format needs an engine that has it and a model that names its matrices.
    wants = {"rollout": {**RECIPE["rollout"], "quantization": "mxfp4"}}
    able = EngineCapabilities(quantizations=frozenset({"mxfp4", "fp8"}))
    named = attrs.evolve(FACTS, matrices={"layers.0.w": (8, 8)})
    assert not check(wants, engine=able, facts=named)
    (lacking,) = check(wants, engine=EngineCapabilities(quantizations=frozenset({"fp8"})), facts=named)
    assert lacking.startswith("rollout.quantization: 'mxfp4', but engine 'embedded' does not hold weights in it (it ")
    assert "has: fp8)" in lacking
    (nameless,) = check(wants, engine=able)
    assert "model plugin 'hf' names no matrices of Tiny" in nameless

    # A layout that cuts a byte of codes is refused with what would do.
    # As the first publication would refuse it (`cosmos_core.weights.quantization`).
    extents = (Extent(axis="tp", name="columns of a feed-forward layer", size=12),)
    facts = attrs.evolve(
        FACTS,
        matrices={"layers.0.up": (12, 8), "layers.0.down": (8, 12), "layers.10.down": (8, 12)},
        column_split=frozenset({"layers.0.down", "layers.10.down", "lm_head"}),
        extents=extents,
    )
    engine = EngineCapabilities(quantizations=frozenset({"mxfp4", "nvfp4", "fp8"}))
    model = ModelCapabilities(mesh_axes=frozenset({"tp"}))

    def found(tp, quantization, facts=facts):
        changes = {
            "policy": {"optimizer": {"lr": 1e-6}, "mesh": {"tp": tp}, "micro_batch_units": 12},
            "rollout": {**RECIPE["rollout"], "quantization": quantization},
        }
        return [each for each in check(changes, engine=engine, facts=facts, model=model) if "in a byte" in each]

    (problem,) = found(4, "mxfp4")
    assert problem == (
        "rollout.quantization: 'mxfp4' has 2 columns in a byte, and policy.mesh.tp = 4 gives a process 3 of the 12 "
        "columns of layers.0.down, and so of 1 more; tp can be 1, 2, 3 or 6, or take 'fp8' or 'mxfp8', whose codes are "
        "a byte each"
    )
    assert found(4, "nvfp4")
    assert not [each for tp in (1, 2, 3, 6) for each in found(tp, "mxfp4")]
    assert not found(4, "fp8")
    # Where columns are whole on each process, rows may be split as they like.
    assert not found(4, "mxfp4", attrs.evolve(facts, column_split=frozenset()))


GAME = {"environment": {"plugin": "game"}}


def test_what_cannot_talk_with_an_environment_is_refused():
    # A model that talks with an environment is fine.
    assert check(GAME, environment=EnvironmentCapabilities()) == []
    weighed = {"environment": {"plugin": "game", "weight": 0.5}, "reward": []}
    assert check(weighed, environment=EnvironmentCapabilities(rewards=True)) == []
    for changes, parts, expected in [
        ({}, {"is_multi_turn": False}, "the model plugin 'hf' does not encode any (`MultiTurnModel`)"),
        ({}, {"engine": EngineCapabilities(payload_kinds=frozenset({"latents"}))}, "makes payloads of kind latents"),
        ({"environment": {"plugin": "game", "weight": 0.5}}, {}, "environment.weight: 0.5, but environment 'game'"),
        (
            {},
            {
                "measured": Measured(
                    num_rows=9, num_demonstrations=9, shortest_prompt=1, longest_prompt=2, num_with_media=4
                )
            },
            "of text (it is no `DialogueVision`), and 4 of 9 train rows of dataset 'numbers' show images or videos;",
        ),
        (
            {"reward": []},
            {"engine": None, "main": AlgorithmCapabilities(source="demonstrations")},
            "nothing is generated",
        ),
    ]:
        found = check({**GAME, **changes}, **{"environment": EnvironmentCapabilities(), **parts})
        assert [problem for problem in found if problem.startswith("environment.") and expected in problem], found


def test_what_is_absent_can_be_planned_and_not_started():
    facts = attrs.evolve(FACTS, absent_weights="no weights in folder")
    parts = parts_of(facts=facts, preflight=Preflight(absent="pip install the-engine"))
    assert problems(recipe_from(RECIPE), parts) == []
    with pytest.raises(ConfigError, match=r"^no weights in folder\npip install the-engine$"):
        check_present(parts)
    check_present(parts_of())


TENSOR = {
    "model": ModelCapabilities(mesh_axes=frozenset({"tp"})),
    "facts": attrs.evolve(FACTS, extents=(Extent(axis="tp", name="attention heads", size=4),)),
}
SPREAD = EngineCapabilities(
    mesh_axes=frozenset({"tp"}),
    media=True,
    records=True,
    quantizations=frozenset({"fp8"}),
    only_alone=frozenset({"media", "records", "quantizations"}),
)


def test_processes_of_a_rollout_replica_need_an_engine_and_a_model_that_share_layers():
    two = rollout(mesh={"tp": 2})
    (found,) = check(two, engine=embedded.cosmos_engine().capabilities, **TENSOR)
    assert found == (
        "rollout.mesh.tp: 2, but engine 'embedded' generates in one process; set it to 1 and raise rollout.replicas, "
        "or take an engine of several processes, such as 'vllm'"
    )
    assert check(two, engine=SPREAD, **TENSOR) == []
    (found,) = check(two, engine=SPREAD)
    assert found.startswith("rollout.mesh.tp: 2, but the model's plugin does not declare the axis tp")
    assert found.endswith("rollout.replicas spreads the work besides")
    (found,) = check(rollout(mesh={"tp": 3}), engine=SPREAD, **TENSOR)
    assert found == "rollout.mesh.tp: 3 does not divide 4 attention heads; tp can be 1, 2 or 4"
    (found,) = check(
        rollout(mesh={"tp": 4}),
        engine=SPREAD,
        **{**TENSOR, "facts": attrs.evolve(FACTS, vocab_size=5, tokenizer_size=5)},
    )
    assert found.startswith("rollout.mesh.tp: 4 leaves processes without a token of a vocabulary of 5")

    # What an engine only does in one process is refused for several.
    facts = attrs.evolve(TENSOR["facts"], matrices={"a": (2, 2)})
    measured = Measured(num_rows=64, num_demonstrations=64, shortest_prompt=9, longest_prompt=20, num_with_media=3)
    records = (Record(name="paths", dtype="int16", shape=(2,), option="model.options.replay"),)
    wanted = {"measured": measured, "records": records, "engine": SPREAD, **TENSOR, "facts": facts}
    assert check(rollout(quantization="fp8"), **wanted) == []
    found = check(rollout(quantization="fp8", mesh={"tp": 2}), **wanted)
    assert found == [
        f"rollout.mesh.tp: 2, but engine 'embedded' is for {what}, in one process only; set tp = 1"
        for what in (
            "rollout.quantization = 'fp8'",
            "prompts that show images or videos",
            "model.options.replay, which records what forwards do",
        )
    ]


def teacher(*, plugin="hf", capabilities=None, **facts):
    capabilities = capabilities or ModelCapabilities(divergences=frozenset({"jsd"}))
    return FrozenFacts(facts=attrs.evolve(FACTS, **facts), misfit="", plugin=plugin, capabilities=capabilities)


def test_a_frozen_model_fits_the_policys_mesh_and_sequences():
    # A frozen model lies on the policys mesh.
    mesh = {"policy": {"optimizer": {"lr": 1e-6}, "mesh": {"dp_shard": 2}, "lora": {"rank": 2}}}
    spread = ModelCapabilities(mesh_axes=frozenset({"dp_shard"}))
    assert check(mesh, model=spread, frozen={"teacher": teacher(capabilities=spread)}) == []
    (problem,) = check(mesh, model=spread, frozen={"teacher": teacher()})
    assert problem.startswith("teacher: it lies on the policy's mesh; policy.mesh.dp_shard")
    # What the policy itself cannot do is told once.
    assert len(check(mesh, frozen={"teacher": teacher()})) == 1

    # A frozen model has room for the policys sequences.
    assert check(frozen={"teacher": teacher(context_length=120)}) == []
    (problem,) = check(frozen={"teacher": teacher(context_length=119)})
    assert problem.startswith("teacher: its context is 119 units, and sequences of this run may have 120;")


def test_divergences_take_both_model_plugins_and_memory():
    # A divergence takes both model plugins.
    able, unable = (ModelCapabilities(divergences=kinds) for kinds in (frozenset({"jsd"}), frozenset()))
    asks = {"consults": {1: {"teacher": Divergence(kind="jsd")}}}
    assert check(**asks, model=able, frozen={"teacher": teacher(plugin="other")}) == []
    (problem,) = check(**asks, model=able, frozen={"teacher": teacher(plugin="other", capabilities=unable)})
    assert "asks for the jsd divergence from the teacher, and model plugin 'other' computes none" in problem
    (problem,) = check(**asks, model=unable, frozen={"teacher": teacher(plugin="other")})
    assert "model plugin 'hf' computes none" in problem

    # References of a steps decisions are kept together.
    for top, each in [(None, 300 * 4), (300, 300 * 4), (64, 64 * 12)]:
        changes = {
            "rollout": {"group_size": 4, "sampling": {"max_units": 100}},
            "policy": {"optimizer": {"lr": 1e-6}, "prompts_per_step": 6},
        }
        consults = {1: {"reference": None, "teacher": Divergence(kind="jsd", top=top)}}
        recipe, parts = recipe_from({**RECIPE, **changes}), parts_of(changes, consults=consults)
        assert reference_bytes(recipe, parts) == 6 * 4 * 100 * each
        spread = attrs.evolve(recipe, policy=attrs.evolve(recipe.policy, replicas=2, mesh=MeshConfig(dp_shard=2, cp=2)))
        assert reference_bytes(spread, parts) == 6 * 4 * 100 * each // 8
        assert reference_bytes(recipe, parts_of(changes)) == 0
