import json

import attrs
import pytest

from cosmos_core.errors import CheckpointError, DamagedCheckpointError
from cosmos_core.policy.checkpoints import checkpoint
from cosmos_core.policy.checkpoints.checkpoint import Contents, Place, check_writable


def place(step, generation=0):
    return Place(run_id="r", step=step, stage=1, nonfinite_steps=2, generation=generation)


@pytest.fixture(params=["path", "memory"])
def url(request, tmp_path):
    if request.param == "memory":
        import fsspec

        yield f"memory://{tmp_path.name}/checkpoints"
        fsspec.filesystem("memory").store.clear()
    else:
        yield str(tmp_path / "checkpoints")


def write(url, *steps, complete=True, generation=0, marker=None):
    from fsspec.core import url_to_fs

    files, root = url_to_fs(url)
    for step in steps:
        files.makedirs(f"{root}/step-{step}", exist_ok=True)
        files.pipe_file(f"{root}/step-{step}/data", b"x")
        if complete:
            said = checkpoint.marker(place(step, generation)) if marker is None else marker
            files.pipe_file(f"{root}/step-{step}/complete.json", said)


def test_nothing_is_there_at_first(url):
    assert checkpoint.completed(url) == []
    assert checkpoint.best(url) is None
    assert checkpoint.prune(url, 1) == []


def test_the_complete_ones_are_told(url):
    write(url, 5, 20, 100)
    write(url, 200, complete=False)
    write(url.replace("checkpoints", "other"), 300)
    assert checkpoint.completed(url) == [5, 20, 100]
    assert checkpoint.read_place(f"{url}/step-100") == place(100)


def test_prune_keeps_the_newest_and_the_best(url):
    write(url, 1, 2, 3, 4, 5)
    checkpoint.mark_best(url, 2)
    assert checkpoint.best(url) == 2
    assert checkpoint.prune(url, 2) == [1, 3]
    assert checkpoint.completed(url) == [2, 4, 5]
    checkpoint.mark_best(url, 5)
    assert checkpoint.prune(url, 1) == [2, 4]


def test_prune_leaves_later_ones_that_the_run_has_gone_back_from(url):
    write(url, 2, 4, 6, 8, 9)
    assert checkpoint.prune(url, 2, newest=6) == [2]
    assert checkpoint.completed(url) == [4, 6, 8, 9]


def test_those_of_steps_that_were_undone_are_dropped_unless_a_later_group_made_them(url):
    write(url, 2, 4, 6)
    write(url, 8, generation=5)
    assert checkpoint.drop_undone(url, 4, 5) == [6]
    assert checkpoint.completed(url) == [2, 4, 8]
    assert checkpoint.drop_undone(url, 0, 6) == [2, 4, 8]
    assert checkpoint.drop_undone(url, 0, 6) == []
    # A damaged one, of whatever group, is of no use to anyone.
    write(url, 7, marker=b"{")
    assert checkpoint.drop_undone(url, 0, 1) == [7]


def test_those_that_an_earlier_group_made_of_a_step_than_did_it_are_not_genuine(url):
    write(url, 2, generation=1)
    write(url, 4, generation=3)
    write(url, 6, generation=2)
    write(url, 8)
    generations = {2: 1, 4: 2, 6: 3, 8: 3}
    places = {step: checkpoint.read_place(f"{url}/step-{step}") for step in generations}
    assert [step for step, made in places.items() if made.is_genuine(generations[step])] == [2, 4, 8]


def test_an_incomplete_one_is_refused(url):
    write(url, 7, complete=False)
    with pytest.raises(CheckpointError, match=r"step-7 is no complete checkpoint: it has no complete\.json"):
        checkpoint.read_place(f"{url}/step-7")


def test_a_bad_marker_is_refused(tmp_path_factory):
    for content, message in [(b"{", "damaged"), (b"[]", r"holds \[\] instead"), (b'{"format": 9}', "format 9")]:
        tmp_path = tmp_path_factory.mktemp("case")
        write(str(tmp_path), 7)
        (tmp_path / "step-7" / "complete.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.read_place(str(tmp_path / "step-7"))


GOOD = {"format": 1, "run_id": "r", "step": 7, "stage": 0, "nonfinite_steps": 0}


def test_a_marker_that_was_changed_by_hand_is_refused_with_its_file_field_and_value(tmp_path_factory):
    for change, message in [
        ({"step": "7"}, r'step-7/complete\.json\.step: expected an integer, got "7"'),
        ({"step": 9}, r"complete\.json\.step: 9, in a folder of step 7"),
        ({"stage": -1}, r"complete\.json\.stage: .*-1"),
        ({"run_id": None}, r"complete\.json\.run_id: .*null"),
        ({"stages": 0}, r"complete\.json\.stages: unknown option; did you mean stage"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        write(str(tmp_path), 7)
        (tmp_path / "step-7" / "complete.json").write_text(json.dumps(GOOD | change))
        with pytest.raises(CheckpointError, match=message):
            checkpoint.read_place(str(tmp_path / "step-7"))


def test_each_flipped_bit_of_a_marker_is_found(tmp_path):
    marker = checkpoint.marker(attrs.evolve(place(7), contents=Contents(sizes={"data": 1}, metadata=5)))
    (tmp_path / "step-7").mkdir()
    for bit in range(8 * len(marker)):
        changed = bytearray(marker)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "step-7" / "complete.json").write_bytes(changed)
        with pytest.raises(DamagedCheckpointError, match=r"complete\.json"):
            checkpoint.read_place(str(tmp_path / "step-7"))


def test_what_an_earlier_release_did_not_note_is_nothing(tmp_path):
    write(str(tmp_path), 7)
    (tmp_path / "step-7" / "complete.json").write_text(json.dumps(GOOD))
    found = checkpoint.read_place(str(tmp_path / "step-7"))
    assert (found.below, found.unimitated_steps, found.generation, found.contents) == ("", 0, 0, None)


def test_a_marker_without_a_field_is_refused(tmp_path):
    write(str(tmp_path), 7)
    (tmp_path / "step-7" / "complete.json").write_text('{"format": 1, "run_id": "r", "step": 7, "stage": 0}')
    with pytest.raises(CheckpointError, match=r"complete\.json\.nonfinite_steps: required, but not given"):
        checkpoint.read_place(str(tmp_path / "step-7"))


def test_a_note_of_the_best_that_was_changed_by_hand_is_refused(tmp_path_factory):
    for content in ['{"step": "4"}', '{"step": true}', '{"step": -1}', "{}", "[4]", "4", "{"]:
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "best.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"best\.json"):
            checkpoint.best(str(tmp_path))


def test_an_unknown_scheme_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="nowhere://x"):
        checkpoint.completed("nowhere://x")


def test_a_damaged_note_of_the_best_is_told(tmp_path):
    (tmp_path / "best.json").write_text(json.dumps({"step": None}))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.best(str(tmp_path))


def test_it_imports_no_torch():
    import subprocess
    import sys

    code = "import sys, cosmos_core.policy.checkpoints.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_place_that_cannot_be_written_is_found_before_training(tmp_path):
    check_writable(f"file://{tmp_path}/new/folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").write_text("")
    for bad in (f"{tmp_path}/file/folder", "nowhere://folder"):
        with pytest.raises(CheckpointError, match="checkpoints at"):
            check_writable(bad)
