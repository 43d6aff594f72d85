"""The audit of a run is printed, for people and as JSON; what does not add up is an exit code."""

import json

import attrs
import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.transport.directives import GroupRef
from cosmos_core.types import Sample, SampleStatus
from cosmos_service_tools import auditor as auditing
from cosmos_service_tools.auditor import Audit, Batch, StageAudit

SAMPLE = Sample(
    index=0,
    status=SampleStatus.OK,
    reward=0.5,
    rewards={},
    oldest_version=1,
    newest_version=2,
    num_units=3,
    num_prompt_units=2,
)
SAMPLES = (SAMPLE, attrs.evolve(SAMPLE, reward=None))
GROUPS = (GroupRef(position=7, row=4, lease=9, samples=SAMPLES), GroupRef(position=8, row=5))
BATCH = Batch(
    step=2, stage=0, attempt=1, generation=1, members=("policy-0",), groups=GROUPS, dropped={}, sequence=31, time=1.0
)
STAGE = StageAudit(given_out=9, consumed=5, dropped={"stale": 3}, live=1, before=0)
SOUND = Audit(
    run_id="r", entries=1234, terms=1, lost=0, stages=(STAGE,), batches=(BATCH,), undone=2, outcome="", problems=()
)


@pytest.fixture
def audited(cosmos, monkeypatch):
    def run(found, *arguments, **expected):
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(auditing, "audit_run", lambda _: found)
        return cosmos("audit", "r", *arguments, **expected)

    return run


def test_a_sound_run_is_proven(audited):
    text = audited(SOUND)
    for words in ("1,234 entries", "1 step(s) on record, 2 more were applied and then given up", "3 stale"):
        assert words in text
    assert text.endswith("Each prompt was consumed exactly once, or dropped with a reason, or is live.\n")
    assert "dropped  live\n" in text
    ended = audited(attrs.evolve(SOUND, outcome="stopped"))
    assert "dropped  unused at the end\n" in ended
    assert ended.endswith("or dropped with a reason, or is unused at the end.\n")
    recovered = attrs.evolve(SOUND, stages=(attrs.evolve(STAGE, before=4),))
    assert "4 ended before the journal was recovered: not proven." in audited(recovered)


def test_a_step_shows_its_batch(audited):
    lines = audited(SOUND, "--step", 2).splitlines()
    assert lines[0] == "Step 2 of stage 0: attempt 1, generation 1 (policy-0), entry 31"
    assert [line.split() for line in lines[2:]] == [
        ["7", "4", "9", "2", "1-2", "0.5", "-"],
        ["8", "5", "demonstration"],
    ]
    with pytest.raises(ConfigError, match="--step 10: is not on record; on record: 2 to 2"):
        audited(SOUND, "--step", 10)


def test_what_does_not_add_up_is_told_and_an_exit_code(audited):
    broken = attrs.evolve(SOUND, problems=("prompt 3 is in two places",))
    text = audited(broken, code=1)
    assert "prompt 3 is in two places" in text
    assert "1 problem(s): the accounting of this run is broken." in text
    told = json.loads(audited(broken, "--json", code=1))
    assert told["problems"] == ["prompt 3 is in two places"]
    assert told["steps"][0]["prompts"][0]["samples"][0]["versions"] == [1, 2]
