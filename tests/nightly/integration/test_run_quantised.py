"""A run whose rollout replicas hold matrices in 8 bits: what travels, what is attested, what it does to a policy."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from cosmos_core.control.journal import replay
from cosmos_core.testing import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SETTINGS = ("warmup.steps=40", "run.steps=4", "evaluation.interval=0", "sync.mode=sync", "rollout.precision=fp32")


def test_a_run_in_fp8_trains_on_what_it_generated_and_shows_how_far_it_is_from_its_weights(
    cosmos: CommandLine, arithmetic: Callable[..., list[str]]
) -> None:
    mismatch, nbytes = {}, {}
    for form in ("none", "fp8"):
        cosmos("run", *arithmetic(form, *SETTINGS, f"rollout.quantization={form}"))
        folder = cosmos.folder / "runs" / form
        state = replay(folder / "journal.sqlite")
        assert json.loads((folder / "summary.json").read_text())["outcome"] == "finished"
        assert not any(replica.rejections for replica in state.replicas.values())
        measured = [record.metrics["mismatch_kl"] for record in state.steps if "mismatch_kl" in record.metrics]
        assert len(measured) == 4
        mismatch[form] = max(map(abs, measured))
        (nbytes[form],) = {published.nbytes for published in state.published.values()}
    assert mismatch["none"] < 1e-6
    assert 1e-6 < mismatch["fp8"] < 0.05
    # 2 layers: float32 becomes a byte, and 4 bytes a row.
    rows = 2 * (96 + 48 + 48 + 96 + 256 + 256 + 96)
    elements = 2 * (2 * 96 * 96 + 2 * 48 * 96 + 3 * 256 * 96)
    assert nbytes["none"] - nbytes["fp8"] == 3 * elements - 4 * rows


def test_a_format_that_the_model_cannot_have_is_refused_by_the_plan(
    cosmos: CommandLine, arithmetic: Callable[..., list[str]]
) -> None:
    output = cosmos("plan", *arithmetic("refused", "rollout.quantization=int4"), code=2)
    assert "rollout.quantization" in output
    assert "mxfp4" in output
    planned = cosmos("plan", *arithmetic("planned", "rollout.quantization=mxfp4"))
    assert "matrices in mxfp4" in " ".join(planned.split())
