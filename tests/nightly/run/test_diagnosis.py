"""Recipes that cannot learn or are slow to, each of which is told what is wrong with it while it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.processes import ForkedCommandLine
from tests.runs import arithmetic

# Planning tries a reward with "I do not know.", and refuses one that scores nothing.
MINE = """
import asyncio, os, random, time

def constant(completion):
    return 0.5

def whim(completion):
    return sum(completion.encode()) % 7 / 7

def ended(completion, truncated):
    return 0.0 if truncated else -1.0 / (1 + len(completion)) + 1.0

def first(completion):
    return ord(completion[0]) % 7 / 7 if completion else 0.0

async def late(prompt, completion):
    await asyncio.sleep(0.0 if sum(prompt.encode()) % 4 else 2.0)
    return whim(completion)

def raises(completion):
    return 0.0 if "know" in completion else completion["answer"]

def hangs(completion):
    time.sleep(0 if "know" in completion else 1000)
    return 0.0

seen = 0

def dies(completion):
    global seen
    seen += 1
    if seen > 8:
        os._exit(3)
    return whim(completion)

def dawdles(completion):
    global seen
    seen += 1
    time.sleep(0 if seen % 24 else 1000)
    return whim(completion)

def nothing(completion):
    return 0.0 if "know" in completion else float("nan")

def noise(split):
    draw = random.Random(split)
    for _ in range(16):
        prompt, completion = ("".join(draw.choices("0123456789", k=number)) for number in (4, 6))
        yield {"prompt": prompt, "completion": completion}
"""
SHORT = ("evaluation.prompts=0", "run.steps=12", "policy.prompts_per_step=8", "rollout.group_size=4")
MEMORISED = (
    "dataset={plugin='./mine.py:noise'}",
    "warmup={plugin='sft', steps=1, optimizer={lr=1e-4}}",
    "algorithm={plugin='sft'}",
    "reward=[]",
    "run.steps=120",
    "evaluation.prompts=16",
    "evaluation.interval=20",
    "policy.optimizer.lr=5e-3",
)
WILD = ("warmup.steps=60", "run.steps=25", "policy.optimizer.lr=50")
BOUND = ("algorithm={plugin='cispo', options={weight_floor=1.0, weight_cap=1.0}}",)
LATE = (
    "run.steps=8",
    "reward.0.timeout_s=10",
    "sync.max_staleness=1",
    "policy.prompts_per_step=32",
    "rollout.group_size=2",
    "rollout.max_in_flight=128",
)
BROKEN = {
    "constant": ("constant", (), r"equal: all rewards are equal in 100% of the groups"),
    "cold": ("first", ("rollout.sampling.temperature=0.01",), r"equal: all rewards are equal in"),
    "cut": ("whim", ("rollout.sampling.max_units=3",), r"truncated: \d+% of the completions"),
    "raises": ("raises", (), r"unscored: .* have no reward \(reward_failed: raises: TypeError: .* \(mine\.py:21\)\)"),
    "nothing": ("nothing", (), r"unscored: .* have no reward \(reward_failed: nothing: the score is not finite: nan\)"),
    "hangs": ("hangs", (), r"reward_timeout: hangs: no score within 0\.5 s"),
    "still": ("whim", ("policy.optimizer.lr=1e-12",), r"learning-rate: the learning rate is 1e-12: in 12 steps"),
    "bound": ("whim", BOUND, r"off-policy: \d+% of the decisions of the newest \d+ steps are clipped"),
    "wild": (
        "ended",
        WILD,
        r"collapsed: the reward fell from .* since step 6\d; lower policy\.optimizer\.lr; begin anew",
    ),
    "hot": (
        "whim",
        ("warmup.optimizer.lr=5",),
        r"collapsed: the loss rose .* warm-up to .*; lower warmup\.optimizer\.lr",
    ),
    "memorised": ("", MEMORISED, r"overfitted: training gets better and held-out rows worse: their loss"),
    "dies": ("dies", (), r"scores: \d+% .* scores; processes of reward dies that ended: \d+, the last: exit code 3 "),
    "dawdles": ("dawdles", (), r"scores: \d+% of .* waiting for scores; \d+ of \d+ samples were late \(dawdles: no"),
    "late": ("late", LATE, r"stale: \d+ of the newest \d+ prompts were too old to train on"),
}
FAILED = ("raises", "nothing", "hangs")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", BROKEN)
def test_a_run_that_cannot_learn_says_why_before_it_ends(tmp_path: Path, name: str) -> None:
    reward, changes, finding = BROKEN[name]
    (tmp_path / "mine.py").write_text(MINE)
    given = f"reward=[{{plugin='./mine.py:{reward}', timeout_s=0.5}}]"
    cosmos = ForkedCommandLine(tmp_path)
    output = cosmos("run", *arithmetic(name, *SHORT, given, *changes), code=int(name in FAILED))
    assert not cosmos.left_behind()
    meanwhile, ended, after = output.partition(f"\n{name} {'failed' if name in FAILED else 'finished'} after ")
    assert ended
    assert re.search(finding, meanwhile), output
    if name == "hangs":
        assert "rollout-0: reward hangs: the last 5 scores were not there within 0.5 s: it hangs; mend it" in after
    elif name == "dies":
        (count,) = re.findall(r"problem: processes of reward dies that ended +(\d+), the last: exit code 3", after)
        told = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        last = f"{count}, the last: exit code 3 (a sample is tried twice)"
        assert told["problems"] == {"processes of reward dies that ended": last}
        rollout = told["planes"]["rollout"]
        assert rollout["waiting for scores"] > rollout["waiting for prompts"]
        assert f"{count}, the last: exit code 3" in (tmp_path / "runs" / name / "report.html").read_text()
        assert f"reward dies that ended: {count}, the last" in cosmos("status", f"runs/{name}")
    elif name == "raises":
        log = (tmp_path / "runs" / name / "logs" / "rollout-0.jsonl").read_text()
        assert log.count("reward raises raised at mine.py:21:") == 1
        assert 'completion[\\"answer\\"]' in log


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_samples_that_cannot_be_written_are_counted_and_told(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "full"
    (tmp_path / "mine.py").write_text(f"""
from pathlib import Path

def obstructs(completion):
    Path({str(folder / "samples")!r}).touch() if Path({str(folder)!r}).exists() else None
    return float(len(completion))
""")
    cosmos = ForkedCommandLine(tmp_path)
    output = cosmos("run", *arithmetic("full", *SHORT, "reward=[{plugin='./mine.py:obstructs'}]"))
    told = json.loads((folder / "summary.json").read_text())
    number = told["samples"]["generated"]
    words = "samples that could not be written"
    advantages = told["problems"]["advantages of prompts that could not be written"]
    assert re.match("96, the last: .*File exists", advantages), advantages
    assert re.match(rf"{number:,}, the last: .*File exists", told["problems"][words])
    meanwhile, _, after = output.partition("full finished after")
    assert len(re.findall(rf"^{words}: [\d,]+, the last: ", meanwhile, re.MULTILINE)) == 1
    assert f"problem: {words}" in after
    assert f"{words}: {number:,}, the last" in cosmos("status", "runs/full")
    assert "they could not be written" in cosmos("samples", "runs/full", code=2)
