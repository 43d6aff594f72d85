"""Samples that a run has kept are printed, for people and as lines of JSON."""

import json
from types import SimpleNamespace

import attrs
import pytest

from cosmos_core.config.loading import load_job, save_job
from cosmos_core.control.machine.events import ReplicaLost, Reported
from cosmos_core.errors import ConfigError
from cosmos_core.policy.training import step
from cosmos_core.rollout.samples import schema
from cosmos_core.run.folder import held
from cosmos_core.storage.parts import FOLDER, PartWriter
from cosmos_core.storage.samples import samples
from cosmos_core.transport.reports import REPORT, GroupFinished
from cosmos_core.types import Sample, SampleStatus
from cosmos_service_tools import printed_samples


def row(lease, index, reward, **more):
    known = {"purpose": "train", "position": 10 + lease, "row": 20 + lease, "oldest_version": 0, "newest_version": 0}
    texts = {"prompt": f"prompt of {lease}?", "reference": f'{{"answer": {lease}}}', "metadata": "{}", "drop": ""}
    made = {"completion": "four ?\x1b[31m", "media": "", "detail": "", "replica": "rollout-0", "prompt_media": []}
    numbers = {"num_units": 2, "num_prompt_units": 3, "truncated": False, "time": float(lease), "status": "ok"}
    scores = {"reward": reward, "rewards": [] if reward is None else [("math", reward)]}
    return {"lease": lease, "index": index, **known, **texts, **made, **numbers, **scores, **more}


@pytest.fixture
def run(tmp_path):
    """A run that has trained a group of two, one without a reward, and dropped a group of one."""
    (tmp_path / "job.json").touch()
    shown = {"turn_rewards": [0.25, 0.0], "prompt_media": ["data:image/png;base64," + 60 * "A", "a.png"]}
    kept = [
        row(2, 0, 0.5, **shown),
        row(2, 1, None, status="reward_failed", detail="math: boom"),
        row(6, 0, 1.0, drop="equal"),
    ]
    batch = {"generation": 1, "step": 1, "attempt": 1, "lease": 2, "position": 12}
    steps = [batch | {"advantages": [0.0, None], "trained": [False, False]}]
    for kind, columns, rows in (("samples", schema, kept), ("steps", step.schema, steps)):
        writer = PartWriter(tmp_path / FOLDER, kind, "replica-0", columns, 1 << 30)
        writer.put(rows, 1)
        writer.close()
    return tmp_path


def test_samples_are_printed_and_cannot_steer_the_terminal(cosmos, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    text = cosmos("samples", run)
    for words in (
        "train: prompt 12, row 22, skipped, step 1",
        'reference: {"answer": 2}',
        'prompt_media: ["data:image/png;base64,… (82 characters)", "a.png"]',
        "#0  reward 0.5 (math 0.5)  advantage 0  of turns 0.25, 0  not trained on  ok  2 units after a prompt",
        "#1  no reward  not trained on  reward_failed",
        "math: boom",
        "four ?\\x1b[31m",
        "dropped, equal",
        "3 samples are kept; how many there were is not known: ",
    ):
        assert words in text
    assert text.index("row 26") < text.index("row 22")
    assert "row 22" not in cosmos("samples", run, "-n", 1)
    lines = cosmos("samples", run, "--json").splitlines()
    assert [json.loads(line).keys() for line in lines] == [next(samples(run)).keys()] * 3
    assert [json.loads(line)["lease"] for line in cosmos("samples", run, "--json", "--worst").splitlines()] == [2, 2, 6]


def test_samples_that_are_missing_have_the_causes_that_there_may_be(run, monkeypatch):
    def missing(address, *lost):
        numbers = {"oldest_version": 0, "newest_version": 0, "num_units": 1, "num_prompt_units": 1}
        one = Sample(index=0, status=SampleStatus.OK, reward=1.0, rewards={}, **numbers)
        report = REPORT.encode(GroupFinished(lease=2, samples=(one,) * 9))
        events = [(0, 0, Reported(name="rollout-0", incarnation="a", sequence=1, report=report)), *lost]
        job = SimpleNamespace(run_id="x", keys=run, journal=run)
        told = {"load_job": job, "find_address": address, "person_key": None, "so_far": events, "entries": events}
        for name, value in told.items():
            monkeypatch.setattr(printed_samples, name, lambda *_, value=value: value)
        return printed_samples.accounted(run).partition("; ")[2]

    assert missing("tcp://here") == "6 are not written yet", "the run goes on"
    lost = (0, 0, ReplicaLost(name="rollout-0", incarnation="a", reason="silent"))
    either = "6 are not written yet, or were lost with a process that was killed"
    assert (missing("tcp://here", lost), missing(None)) == (either, either)


def test_a_damaged_file_is_left_out_and_said(cosmos, run):
    (run / FOLDER / "steps.policy-9.9.parquet").write_bytes(b"PAR1")
    text = cosmos("samples", run)
    assert "prompt 12, row 22, skipped, step 1" in text
    assert "3 samples are kept; cannot be read, and left out: steps.policy-9.9.parquet; " in " ".join(text.split())


def test_what_is_not_there_is_a_sentence(cosmos, run, tmp_path, plain_export, monkeypatch):
    for arguments, words in (
        ([run, "--step", 9], "no kept sample is as asked for; steps 1 to 1 were trained"),
        ([run, "--worst", "--best"], "--worst and --best: give one of them"),
        ([tmp_path / "nowhere"], "nowhere: not the folder of a run"),
        ([plain_export.parent], r"mine: the run has no samples: .* generates none \(mine: not begun yet\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            cosmos("samples", *arguments)
    job = load_job(plain_export.parent)
    save_job(attrs.evolve(job, uses_rollouts=True))
    with pytest.raises(ConfigError, match=r"mine: no samples are kept yet: .* \(mine: not begun yet\)"):
        cosmos("samples", job.directory)
    job.journal.touch()
    monkeypatch.setattr(printed_samples, "look", lambda _: iter(["mine: interrupted"]))
    with pytest.raises(ConfigError, match=r"the run ended without a word before any was written \(mine: interr"):
        cosmos("samples", job.directory)
    with held(job.directory), pytest.raises(ConfigError, match="no samples are kept yet: "):
        cosmos("samples", job.directory)
