"""What vLLM cannot do of a run is told when it is planned, without importing vLLM."""

import subprocess
import sys

import attrs
import pytest

from cosmos_core.errors import EngineError
from cosmos_core.protocols import ModelFacts, PlannedRun
from cosmos_core.protocols.facts import ModelPart
from cosmos_engine_vllm import installation
from cosmos_engine_vllm.options import VllmOptions
from cosmos_engine_vllm.preflight import preflight

FACTS = ModelFacts(
    architecture="TinyForCausalLM",
    num_parameters=1,
    num_layers=1,
    hidden_size=96,
    vocab_size=300,
    tokenizer_size=300,
    context_length=256,
    stop_ids=frozenset({2}),
    pad_id=0,
    head_size=32,
)
PLANNED = PlannedRun(
    model=None,
    facts=FACTS,
    device="cpu",
    has_gpu=False,
    precision="float32",
    temperatures={"rollout.sampling.temperature": 1.0},
    shows_media=False,
)


class Shows:
    condition = enter = evaluate = print

    def shown(self, prompt):
        return []


@pytest.fixture
def asked(monkeypatch):
    """Ask with a planned run changed, on a machine where vLLM is installed as it should be; who was asked for, too."""

    def ask(options=VllmOptions(), **changes):  # noqa: B008 - it cannot be changed
        devices = []
        monkeypatch.setattr(installation, "check_installed", devices.append)
        return preflight(options, attrs.evolve(PLANNED, **changes)), devices

    return ask


def test_a_cpu_has_no_memory_that_vllm_could_give_up(asked):
    (problem,) = asked(sleeps=True)[0].problems
    assert "rollout.placement: 'colocated', and rollout.device is 'cpu': " in problem
    assert not asked(sleeps=True, device="cuda")[0].problems
    undecided = asked(sleeps=True, device="auto")[0]
    told = problem.replace("rollout.device is 'cpu'", "no GPU was found here")
    assert (undecided.problems, undecided.absent) == ((), told), "the run may be for a machine with GPUs"


def test_nothing_is_said_against_what_it_can_do(asked):
    told, devices = asked(temperatures={"one": 0.0, "other": 0.01})
    assert (told.problems, told.absent, devices) == ((), "", ["cpu"])


def test_the_installation_is_that_for_the_device(asked, subtests):
    for device, has_gpu, where in [("auto", True, "cuda"), ("auto", False, "cpu"), ("cuda", False, "cuda")]:
        with subtests.test(device=device, has_gpu=has_gpu, where=where):
            assert asked(device=device, has_gpu=has_gpu)[1] == [where]


def test_a_temperature_below_its_least_is_refused_by_its_key(asked):
    (problem,) = asked(temperatures={"rollout.sampling.temperature": 0.005})[0].problems
    assert problem.startswith("rollout.sampling.temperature: 0.005, and vLLM draws at temperatures from 0.01 on")


def test_plans_count_what_it_takes(asked):
    told = asked(VllmOptions(memory_share=0.5))[0]
    assert (told.gpu_share, told.gpu_share_key) == (0.5, "rollout.engine.options.memory_share")
    assert (told.outside_bytes, told.builds_on_host) == (1 << 30, True)
    assert asked(VllmOptions(compile=False))[0].outside_bytes == 0


def test_heads_that_its_attention_on_a_cpu_lacks_are_refused_there(asked):
    odd = attrs.evolve(FACTS, head_size=24)
    (problem,) = asked(facts=odd)[0].problems
    assert "heads of 32, 64, 80, " in problem
    assert "those of TinyForCausalLM have 24; change head_dim" in problem
    # The device is left open: another machine may have GPUs.
    told, _ = asked(facts=odd, device="auto")
    assert told.problems == ()
    assert "TinyForCausalLM have 24" in told.absent
    assert asked(facts=odd, device="auto", has_gpu=True)[0].absent == ""
    assert asked(facts=attrs.evolve(FACTS, head_size=0))[0].problems == ()


def test_images_need_a_model_that_says_what_it_shows(asked):
    (problem,) = asked(shows_media=True, model=object())[0].problems
    assert "object does not say what its prompts show" in problem
    assert asked(shows_media=True, model=Shows())[0].problems == ()


def test_what_sees_is_for_one_process(asked):
    (problem,) = asked(num_ranks=2, model=Shows())[0].problems
    assert problem.startswith("rollout.mesh: 2 processes of vLLM, and TinyForCausalLM sees images")
    assert asked(num_ranks=2, model=object())[0].problems == ()


def test_whole_experts_need_experts_and_several_processes(asked):
    options = VllmOptions(expert_parallel=True)
    dense = attrs.evolve(FACTS, parts=[ModelPart(name="layers", num_parameters=1)])
    experts = attrs.evolve(FACTS, parts=[ModelPart(name="layers", num_parameters=2, num_expert_parameters=1)])
    (problem,) = asked(options, facts=dense, num_ranks=2)[0].problems
    assert problem.startswith("rollout.engine.options.expert_parallel: true, and TinyForCausalLM has no experts")
    (problem,) = asked(options, facts=experts)[0].problems
    assert "with rollout.mesh.tp = 1 one process has all experts" in problem
    assert asked(options, facts=experts, num_ranks=2)[0].problems == asked(facts=dense)[0].problems == ()


def test_what_is_wrong_with_the_installation_is_absent_here(monkeypatch):
    def fail(device):
        raise EngineError(f"pip install for {device}")

    monkeypatch.setattr(installation, "check_installed", fail)
    told = preflight(VllmOptions(), PLANNED)
    assert (told.problems, told.absent) == ((), "pip install for cpu")


def test_listing_the_plugin_imports_no_torch():
    code = (
        "import sys, cosmos_engine_vllm.plugin as plugin\n"
        "plugin.cosmos_engine()\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
