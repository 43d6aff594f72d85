"""Samples that a run has kept are found, and joined with what became of them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow import parquet

from cosmos_core.errors import ConfigError
from cosmos_core.rollout.samples import rows_of
from cosmos_core.storage.parts import FOLDER
from cosmos_core.storage.samples import damaged, groups, none_found, ratios, samples
from cosmos_core.transport.directives import Lease
from cosmos_core.types import Message, Payload, Prompt, Sample, SampleStatus
from tests.kept_samples import group, keep, payload, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was taken back from step 3 to step 1; its leases 3 and 4 were undone, 5 came in place of 3."""
    tmp_path = tmp_path_factory.mktemp("run")
    (tmp_path / "job.json").touch()
    # The steps of one policy replica, and after its loss of another.
    for name, kind, some in (
        ("rollout-0", "samples", [*group(1, 1.0, 0.0), *group(2, 0.5, None), *group(3, 1.0, 1.0)]),
        (
            "rollout-1",
            "samples",
            [*group(4, 0.0, 0.2, version=2), *group(5, 0.25, 0.75), *group(6, 1.0, drop="equal")],
        ),
        ("rollout-0", "samples", [*group(7, 0.0), *group(8, 1.0, purpose="evaluation", version=2)]),
        ("policy-1", "steps", [trained(2, 2, 5, -1.0, 1.0, attempt=2)]),
        (
            "policy-0",
            "steps",
            [
                *(trained(1, 1, 1, 0.5, -0.5), trained(1, 1, 2, 0.0, None)),
                *(trained(1, 2, 3, 0.0, 0.0), trained(1, 3, 4, -1.0, 1.0), trained(1, 2, 5, 9.0, 9.0)),
            ],
        ),
    ):
        keep(tmp_path, kind, name, some)
    return tmp_path


def told(run, *names, **wanted):
    return [tuple(each[name] for name in names) for each in samples(run, **wanted)]


def test_evaluations_of_what_was_undone_are_undone(tmp_path):
    (tmp_path / "job.json").touch()
    rolled_back = [trained(1, 2, 3, 1.0), trained(1, 3, 5, 1.0), trained(2, 2, 7, 1.0)]
    evaluated = [(4, 2), (6, 3), (8, 2), (2, 1)]
    for kind, rows in (
        ("steps", rolled_back),
        (
            "samples",
            [row for lease, version in evaluated for row in group(lease, 1.0, purpose="evaluation", version=version)],
        ),
    ):
        keep(tmp_path, kind, "rollout-0", rows)
    fates = {4: "undone", 6: "undone", 8: "evaluated", 2: "evaluated"}
    assert dict(told(tmp_path, "lease", "fate")) == fates


def test_what_json_has_no_word_for_is_kept_as_words(run):
    (row,) = group(1, 1.0, reference={"day": {1, 2}}, metadata={(1, 2): "pair"})
    assert row["reference"] == '{"day": "{1, 2}"}'
    assert "pair" in row["metadata"]


def test_samples_are_joined_with_the_newest_attempt_at_their_step(run):
    assert sorted(told(run, "lease", "index", "fate", "step", "attempt", "advantage"), key=lambda each: each[:2]) == [
        (1, 0, "trained", 1, 1, 0.5),
        (1, 1, "trained", 1, 1, -0.5),
        (2, 0, "skipped", 1, 1, 0.0),
        (2, 1, "skipped", 1, 1, None),
        (3, 0, "undone", 2, 1, 0.0),
        (3, 1, "undone", 2, 1, 0.0),
        (4, 0, "undone", 3, 1, -1.0),
        (4, 1, "undone", 3, 1, 1.0),
        (5, 0, "trained", 2, 2, -1.0),
        (5, 1, "trained", 2, 2, 1.0),
        (6, 0, "dropped", None, None, None),
        (7, 0, "unused", None, None, None),
        (8, 0, "evaluated", 2, None, None),
    ]
    first = next(samples(run, position=11))
    assert first["prompt"] == "prompt of 1?"
    assert (first["reference"], first["metadata"], first["rewards"]) == ({"answer": 1}, {}, {"math": 1.0})
    assert first["completion"] == "four ?\x1b[31m"
    assert (first["units"], first["logprobs"]) == ([5, 6], [-0.5, -0.5])
    assert (first["row"], first["replica"], first["truncated"], first["num_prompt_units"]) == (
        21,
        "rollout-0",
        False,
        3,
    )


@pytest.mark.parametrize(
    ("wanted", "leases"),
    [
        ({"step": 2}, {3, 5, 8}),
        ({"step": 2, "purpose": "train"}, {3, 5}),
        ({"step": 7}, set()),
        ({"purpose": "evaluation"}, {8}),
        ({"status": "reward_failed"}, {2}),
        ({"row": 24}, {4}),
        ({"position": 14, "status": None}, {4}),
        ({"grep": "of [67]"}, {6, 7}),
        ({"grep": "four", "row": 25}, {5}),
    ],
)
def test_samples_are_found(run, wanted, leases):
    assert {lease for (lease,) in told(run, "lease", **wanted)} == leases


def test_prompts_come_newest_worst_or_best_first(run):
    assert [found[0]["lease"] for found in groups(run, order="worst", count=3, purpose="train")] == [7, 4, 5]
    assert [found[0]["lease"] for found in groups(run, order="best", count=2, step=2)] == [8, 3]
    assert [[each["index"] for each in found] for found in groups(run, grep="of 2")] == [[0, 1]]
    for early, late in [(1, 5), (5, 7)]:
        places = [found[0]["lease"] for found in groups(run, count=99)]
        assert places.index(late) < places.index(early)


def test_files_of_other_names_are_no_parts(run, tmp_path):
    run = Path(shutil.copytree(run, tmp_path / "copy"))
    for name in ("mine", "rollout-0.²", "rollout-0.12.bak", "12"):
        (run / FOLDER / f"samples.{name}.parquet").write_bytes(b"no part")
    assert len(list(samples(run))) == 13


def test_ratios_are_of_the_newest_attempt_and_other_parts_are_not_read_for_them(tmp_path, monkeypatch):
    early = [trained(1, 1, 1, 0.5, attempt=2, ratios=[[2.0]]), trained(1, 1, 2, 0.5, ratios=[[3.0]])]
    late = [trained(1, 1, 1, 0.5, attempt=1, ratios=[[1.0]]), trained(2, 1, 2, 0.5, ratios=[[4.0, 5.0]])]
    for name, rows in (("policy-0", early), ("policy-1", late), ("policy-2", [trained(3, 1, 3, 0.5, ratios=[[6.0]])])):
        keep(tmp_path, "steps", name, rows)
    assert ratios(tmp_path, [1, 2], 1) == {(1, 0): [2.0], (2, 0): [4.0]}
    read, found = parquet.ParquetFile.read, []
    monkeypatch.setattr(
        parquet.ParquetFile, "read", lambda file, columns: found.append("ratios" in columns) or read(file, columns)
    )
    assert ratios(tmp_path, [3], 1) == {(3, 0): [6.0]}
    assert (found.count(True), found.count(False)) == (1, 3)


def test_what_is_not_there_is_a_sentence(run, tmp_path, caplog):
    run = Path(shutil.copytree(run, tmp_path / "copy"))
    assert none_found(run) == "no kept sample is as asked for; steps 1 to 3 were trained"
    for wanted, words in (
        ({"grep": "("}, "'(' is no regular expression: "),
        ({"status": "good"}, "status 'good' is none of ok, truncated, "),
        ({"purpose": "test"}, "purpose 'test' is none of train, evaluation"),
    ):
        with pytest.raises(ConfigError) as caught:
            groups(run, **wanted)
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="nowhere: not the folder of a run"):
        groups(tmp_path / "nowhere")
    # A file that is no part, and one with a hole.
    sound = next((run / FOLDER).glob("samples.rollout-1.*")).read_bytes()
    whole = len(list(samples(run)))
    for data in (b"PAR1 and no more", sound[:100] + b"?" * 400 + sound[500:]):
        (run / FOLDER / "samples.rollout-3.1.parquet").write_bytes(data)
        assert len(list(samples(run))) == whole
        assert "samples.rollout-3.1.parquet: cannot be read, and is left out: " in caplog.text
        assert damaged(run) == "cannot be read, and left out: samples.rollout-3.1.parquet"
        caplog.clear()
    (run / FOLDER / "samples.rollout-3.1.parquet").write_bytes(sound)
    assert damaged(run) == ""
    for path in (run / FOLDER).iterdir():
        path.unlink()
    # One that keeps none, or none so far, says why, and when they will come.
    run_of = {"recipe": {"warmup": {"steps": 800}}}
    unwritten = {"problems": {"samples that could not be written": "disk full"}}
    for job, ended, words in (
        ({}, {}, "no samples are kept yet: they come as soon as "),
        (run_of, {}, "no samples are kept yet: they come after the 800 steps of the warm-up, as soon as "),
        (run_of, {"outcome": "stopped"}, "no samples are kept: the run stopped before any was written"),
        ([], {"outcome": "stopped"}, "no samples are kept: the run stopped before any was written"),
        ({"recipe": {"samples": None}}, None, "no samples are kept yet: they come as soon as "),
        (run_of, {"outcome": "stopped", **unwritten}, "no samples are kept: they could not be written: disk full"),
        (run_of, {"samples": {"generated": 9}}, "the 9 samples of the run are not kept: an earlier release made it"),
        ({"recipe": {"samples": {"keep": "none"}}}, {}, 'the run keeps no samples: samples.keep is "none"'),
        ({"uses_rollouts": False}, {}, "the run has no samples: it learns from the dataset's own answers"),
    ):
        for name, content in (("job.json", job), ("summary.json", ended)):
            (run / name).write_text(json.dumps(content))
        assert none_found(run).startswith(words)
    (run / "summary.json").unlink()
    (run / "job.json").write_text("null")
    assert none_found(run).endswith("scored; `cosmos status` tells how far the run is, and what is wrong with it")
    ended = "no samples are kept: the run ended without a word before any was written"
    assert none_found(run, goes_on=False) == ended


def test_a_dialogue_has_no_logprobs_where_the_model_did_not_speak_and_latents_have_no_tokens():
    chat = Prompt(text=(Message(role="user", content="2+2?"),), media=("a.png",))
    made = Sample(
        index=0,
        status=SampleStatus.OK,
        reward=1.0,
        rewards={},
        oldest_version=0,
        newest_version=0,
        num_units=1,
        num_prompt_units=3,
    )
    lease = Lease(lease=1, purpose="train", position=0, row=0, version=-1)
    for held, tokens in (
        (payload([False, True]), ([5, 6], [None, -0.5])),
        (Payload(kind="latents", arrays={}), (None, None)),
    ):
        played = SimpleNamespace(generated=SimpleNamespace(payload=held), status=SampleStatus.TRUNCATED)
        (row,), _ = rows_of(lease, chat, [made], [played], [""])
        units = row.get("units")
        assert (units if units is None else units.tolist(), row.get("logprobs")) == tokens
        assert (row["prompt"], row["prompt_media"], row["truncated"]) == ("user: 2+2?", ["a.png"], True)


def test_reading_does_not_import_pandas(run):
    code = (
        "import sys; from pathlib import Path; from cosmos_core.storage.samples import groups, ratios; "
        "found = groups(Path(sys.argv[1]), purpose='train', step=2); assert found, found; "
        "ratios(Path(sys.argv[1]), [1, 2], 4); sys.exit('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
