"""Scores by label, and how sure they are."""

import json

import attrs
import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.types import Prompt
from cosmos_service_tools.scores import (
    Evaluated,
    check_place,
    figures,
    interval,
    lines,
    mean_score,
    mean_scores_by,
    write,
)


def scored(*pairs, key="labels"):
    return [(Prompt(text="?", metadata={} if label is None else {key: label}), score) for label, score in pairs]


def test_intervals_by_hand():
    # Wilsons interval by hand.
    # 8 of 10: (0.8 + 0.19207) / 1.38415 -+ 1.96 sqrt(0.016 + 0.0096036) / 1.38415
    assert interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    low, high = interval([1.0] * 20)
    assert (low, high) == (pytest.approx(0.83887, abs=1e-5), 1.0)
    assert interval([0.0])[0] == 0.0
    assert interval([0.0])[1] == pytest.approx(0.79345, abs=1e-5)

    # Other scores have the interval of their standard error.
    # Mean 2, variance 1, standard error 1/sqrt(3).
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 1.95996 / 3**0.5, 2 + 1.95996 / 3**0.5), abs=1e-4)


def test_a_prompt_counts_for_each_of_its_labels_and_once():
    found = mean_scores_by(
        scored((["space", "space/order"], 1.0), ("space", 0.0), (["space", "space"], None)), "labels"
    )
    assert [(each.label, each.num_prompts, each.num_unscored) for each in found] == [
        ("space", 3, 1),
        ("space/order", 1, 0),
    ]
    assert found[0].mean == pytest.approx(1 / 3)

    # Prompts without a label are a group.
    for value in [None, []]:
        (found,) = mean_scores_by(scored((value, 1.0)), "labels")
        assert found.label == "(none)"

    # Numbers are labels too.
    assert [each.label for each in mean_scores_by(scored((2, 1.0), (1, 0.0), key="level"), "level")] == ["1", "2"]


def evaluated():
    groups = tuple(mean_scores_by(scored(("space", 1.0), ("time", None)), "labels"))
    return Evaluated(
        score=0.5,
        num_prompts=2,
        num_unscored=1,
        num_truncated=0,
        rewards={"r": 1.0},
        total=mean_score("all", [1.0, None]),
        groups=groups,
    )


def test_a_table_and_figures_for_people():
    # A table for people.
    assert list(lines(evaluated(), "labels")) == [
        "labels  prompts  unscored      mean  95 % interval",
        "space         1         0    1.0000  0.2065 to 1.0000",
        "time          1         1    0.0000  0.0000 to 0.7935",
        "all           2         1    0.5000  0.0945 to 0.9055",
    ]
    (below,) = mean_scores_by(scored(("space", -11.0), ("space", -12.0)), "labels")
    assert list(lines(attrs.evolve(evaluated(), groups=(below,), total=None), "labels"))[1:] == [
        "space         2         0  -11.5000  -12.4800 to -10.5200"
    ]

    # Scores that may be below 0 are those of scored prompts alone.
    space, time = mean_scores_by(
        scored(("space", -1.0), ("space", -2.0), ("space", None), ("time", None)), "labels", unscored=None
    )
    assert (space.mean, space.num_prompts, space.num_unscored) == (-1.5, 3, 1)
    assert (time.mean, time.low, time.high) == (None, None, None)
    assert list(lines(attrs.evolve(evaluated(), groups=(time,), total=None), "labels"))[1:] == [
        "time          1         1  not measured"
    ]

    # Figures are called what they are.
    of_text = ["held-out accuracy 0.5000", "prompts 2, unscored 1, truncated 0", "reward r 1.0000"]
    assert list(figures(evaluated())) == of_text
    denoised = attrs.evolve(evaluated(), name="reward")
    assert list(figures(denoised)) == ["held-out reward 0.5000", *of_text[1:]]
    assert next(figures(attrs.evolve(denoised, score=None))) == "held-out reward not measured"


def test_a_file_for_programs(tmp_path):
    write(evaluated(), tmp_path / "found.json", "labels")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["by"], found["accuracy"], "score" in found) == ("labels", 0.5, False)
    assert [group["label"] for group in found["groups"]] == ["space", "time"]

    # A file says reward where there is no accuracy.
    write(attrs.evolve(evaluated(), name="reward"), tmp_path / "found.json", None)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["reward"], "accuracy" in found) == (0.5, False)

    # A place that is not there is refused before anything is evaluated.
    check_place(None)
    check_place(tmp_path / "found.json")
    with pytest.raises(ConfigError, match=r"--output: no folder .*none; make it"):
        check_place(tmp_path / "none" / "found.json")
