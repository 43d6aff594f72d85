"""AdamW in 8 bits is torchao's, in any layout; its checkpoints go on in another one, and it travels as it is stored."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cosmos_core.config.schema import OptimizerConfig
from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.policy.checkpoints import saver
from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.reader import restore
from cosmos_core.policy.checkpoints.saver import copy_state, write_checkpoint
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.training.gradients import stored
from cosmos_core.policy.training.optimizers import Optimizer
from cosmos_core.testing.layouts import make_trainer, train_step, whole, worst_error
from cosmos_core.testing.worlds import run_world
from tests.families import CONFIGS, family, text_payloads
from tests.nightly.layouts.test_matrix import policy

ROOT = Path(__file__).parents[3]
KIND = "adamw-8bit"


@pytest.fixture(scope="module", autouse=True)
def torchao(tmp_path_factory):
    """torchao beside the environment: installed in it, transformers would import it in every process."""
    if find_spec("torchao") is not None:
        yield
        return
    (pin,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torchao=="))
    folder = str(tmp_path_factory.mktemp("torchao"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, pin], check=True
    )
    sys.path.append(folder)
    importlib.invalidate_caches()
    yield
    sys.path.remove(folder)


def test_it_is_torchaos(monkeypatch):
    from torchao.optim import AdamW8bit

    made, twin = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128)
    twin.load_state_dict(made.state_dict())
    own = Optimizer(made, OptimizerConfig(kind=KIND))
    theirs = AdamW8bit(twin.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    for _ in range(3):
        for one, other in zip(made.parameters(), twin.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        own.step(0.1, 0.5)
        with torch.compiler.set_stance("force_eager"):
            theirs.step()
    assert torch.equal(made.weight, twin.weight)
    assert torch.equal(made.bias, twin.bias)
    codes, scales, _ = stored(own.state()["weight.exp_avg"])
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (128, 64), (32,))
    assert own.state()["bias.exp_avg"].dtype == torch.float32
    # A checkpoint's copy is of plain values, which a device copies by itself.
    copied = []
    monkeypatch.setattr(saver, "_VALUES_AT_ONCE", 4096)
    monkeypatch.setattr(saver, "copy_exactly", lambda *pair, non_blocking: copied.append((*pair, non_blocking)))
    saver.copy_state({"m": own.state()["weight.exp_avg"]}, Place(run_id="t", step=1, stage=0, nonfinite_steps=0))
    pieces, values = [source for _, source, _ in copied[:2]], own.state()["weight.exp_avg"].dequantize()
    assert all(type(source) is torch.Tensor and beside for _, source, beside in copied)
    assert [target.shape for target, *_ in copied[:2]] == [(4096,), (4096,)]
    assert torch.equal(torch.cat(pieces), values.view(-1))
    kept = sum(piece.numel() * piece.itemsize for piece in own.held() if piece.shape != (256,))
    assert kept == 2 * (8192 + 4 * 32) + 8 * 128 + 2 * 4


def steps(settings, world, before=0, folder="", path=""):
    """Train on, from a checkpoint or into one; the weights, and where the checkpoint is."""
    trainer = make_trainer(family("hf", CONFIGS["qwen3"])(), settings, world)
    if path:
        restore(trainer, path, lambda index: None)
    for number in range(before, before + 2):
        train_step(trainer, text_payloads(seed=number))
    if folder:
        place = Place(run_id="test", step=trainer.step, stage=0, nonfinite_steps=0)
        path = write_checkpoint(folder, copy_state(trainer.state(), place), open_channel())
    coded = sum(len(stored(tensor)) > 1 for tensor in trainer.optimizer.state().values())
    return whole(dict(trainer.module.named_parameters()), trainer.world), path, coded


def spread(settings, *args):
    return steps(settings, World(form_mesh(settings.mesh, "cpu")), *args)


def test_layouts_and_a_checkpoint_in_another_one(tmp_path):
    alone, _, coded = steps(policy(optimizer=KIND), single_world())
    assert coded > 0
    for axes in ({"dp_shard": 2}, {"tp": 2}):
        folder = tmp_path / next(iter(axes))
        found, path, coded = run_world(2, spread, policy(optimizer=KIND, **axes), 0, str(folder))[0]
        assert coded > 0
        worst, error = worst_error(found, alone)
        # Blocks of 256 lie otherwise, so codes are others.
        assert error <= 1e-3, (worst, error)
        gone_on, *_ = steps(policy(optimizer=KIND), single_world(), 2, "", path)
        uninterrupted, *_ = run_world(2, spread, policy(optimizer=KIND, **axes), 2, "", path)[0]
        worst, error = worst_error(gone_on, uninterrupted)
        assert error <= 1e-3, (worst, error)


def test_what_is_read_is_what_was_stored(tmp_path):
    trainer = make_trainer(family("hf", CONFIGS["qwen3"])(), policy(optimizer=KIND), single_world())
    train_step(trainer, text_payloads(seed=0))
    place = Place(run_id="test", step=1, stage=0, nonfinite_steps=0)
    path = write_checkpoint(str(tmp_path), copy_state(trainer.state(), place))
    other = make_trainer(family("hf", CONFIGS["qwen3"])(), policy(optimizer=KIND), single_world(), seed=9)
    restore(other, path, lambda index: None)
    for name, tensor in trainer.optimizer.state().items():
        kept, read = (torch.zeros(tensor.shape).copy_(each) for each in (tensor, other.optimizer.state()[name]))
        # The largest of a block is rounded by 0.7 % where it is negative, and the others are scaled by it.
        assert (kept - read).abs().max() <= 0.01 * kept.abs().max(), name
