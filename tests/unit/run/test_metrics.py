import json
import math

from cosmos_core.run.metrics import FILE, read, recorded


def finish(notify, kind, step, **metrics):
    notify(f"cosmos_{kind}_finished", step=step, metrics=metrics)


def test_figures_are_kept_whatever_hooks_there_are_and_what_was_undone_is_left_out(tmp_path):
    told = []
    notify = recorded(tmp_path, lambda hook, **arguments: told.append(hook))
    notify("cosmos_replica_joined", replica="policy-0", role="policy")
    for step in (1, 2, 3):
        finish(notify, "step", step, loss=1 / step)
    finish(notify, "evaluation", 2, accuracy=0.5)
    finish(notify, "evaluation", 3, accuracy=math.nan)
    assert len(told) == 6
    assert [(row["kind"], row["step"]) for row in read(tmp_path)] == [
        ("step", 1), ("step", 2), ("step", 3), ("evaluation", 2), ("evaluation", 3)
    ]  # fmt: skip
    assert read(tmp_path)[-1]["accuracy"] is None
    assert all(json.loads(line, parse_constant=lambda _: 1 / 0) for line in (tmp_path / FILE).read_text().splitlines())

    finish(notify, "step", 3, loss=0.25)
    assert [(row["kind"], row["step"]) for row in read(tmp_path)] == [
        ("step", 1), ("step", 2), ("evaluation", 2), ("step", 3)
    ]  # fmt: skip


def test_a_line_that_was_cut_off_costs_no_other(tmp_path):
    finish(recorded(tmp_path, lambda *_, **__: None), "step", 1, loss=1.0)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"kind": "step", "st\xff')
    finish(recorded(tmp_path, lambda *_, **__: None), "step", 2, loss=0.5)
    with (tmp_path / FILE).open("a") as file:
        file.write("3\n")
    assert [row["step"] for row in read(tmp_path)] == [1, 2]


def test_a_folder_that_cannot_be_written_to_costs_no_step(tmp_path):
    told = []
    finish(recorded(tmp_path / "gone", lambda hook, **_: told.append(hook)), "step", 1)
    assert told == ["cosmos_step_finished"]
    assert read(tmp_path / "gone") == []
