"""GRPO runs of mixtures of experts: the experts that the rollout engine's routers chose are those that training uses.

In lockstep, in float32, trainer and rollout have the same weights, so that replay must change nothing; that training
does use what was recorded where weights differ is tested with the plugin. Rewards are a whim of the completion's bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_core.control.journal import replay
from tests.commandline import CommandLine
from tests.runs import WHIM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SETTINGS = (
    "warmup.steps=1",
    "run.steps=4",
    "sync.mode=sync",
    "evaluation.prompts=0",
    "reward=[{plugin='whim'}]",
    "policy.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.sampling.max_units=12",
    "policy.optimizer.eps=1e-4",
    "policy.checkpoint.interval=0",
)
SIZES = """hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, moe_intermediate_size=16,
num_experts_per_tok=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=false,""".replace(
    "\n", " "
)
CONFIGS = {
    "qwen3-moe": "model_type='qwen3_moe', num_key_value_heads=2, head_dim=8, num_experts=4, norm_topk_prob=true",
    "deepseek": "model_type='deepseek_v3', num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, "
    "first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, "
    "n_group=1, topk_group=1, num_nextn_predict_layers=0",
}


def curve(run: Path) -> list[float]:
    """Loss and gradient norm of each step that learned from rewards."""
    steps = [step for step in replay(run / "journal.sqlite").steps if step.stage == 1]
    return [step.metrics[name] for step in steps for name in ("loss", "grad_norm")]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_run_trains_on_the_experts_of_its_rollouts(
    cosmos: CommandLine,
    arithmetic: Callable[..., list[str]],
    make_distribution: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    folder = make_distribution("whim-reward", entries={"reward/whim": "whim"}, modules={"whim.py": WHIM})
    monkeypatch.setenv("PYTHONPATH", str(folder))
    curves = []
    for name, is_replayed in (("free", "false"), ("replayed", "true")):
        model = (f"model.plugin={family}", f"model.config={{{SIZES} {CONFIGS[family]}}}")
        cosmos("run", *arithmetic(name, *SETTINGS, *model, f"model.options.router_replay={is_replayed}"))
        curves.append(curve(cosmos.folder / "runs" / name))
    free, replayed = curves
    assert len(free) == 8
    assert max(free[1::2]) > 1e-3, "nothing was learned, so nothing is proved"
    assert replayed == pytest.approx(free, abs=1e-5)
