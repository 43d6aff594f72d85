import re

import attrs

from cosmos_core.control.page.metrics import render

SERIES = re.compile(r'[a-z_]+(\{[a-z_]+="([^"\\\n]|\\["\\n])*"(,[a-z_]+="([^"\\\n]|\\["\\n])*")*\})? \S+')


def test_every_line_is_of_the_text_format_and_every_name_is_ours(snapshot):
    lines = render(snapshot, num_clients=2).splitlines()
    for line in lines:
        assert line.startswith(("# HELP cosmos_", "# TYPE cosmos_", "cosmos_"))
        assert line.startswith("#") or SERIES.fullmatch(line), line
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_the_figures(snapshot):
    several = attrs.evolve(snapshot, rewards={"math": 0.75, "format": 1.0})
    lines = render(several, num_clients=2).splitlines()
    for line in (
        "cosmos_step 3",
        "cosmos_weight_version 3",
        'cosmos_prompts{place="in_flight"} 5',
        'cosmos_prompts_dropped_total{reason="stale"} 3',
        'cosmos_recent_samples{staleness="1"} 6',
        'cosmos_replicas{role="rollout",state="loading"} 1',
        'cosmos_replica_weight_version{replica="rollout-1",role="rollout"} 2',
        'cosmos_units_per_second{pool="rollout"} 200.5',
        "cosmos_page_clients 2",
        'cosmos_reward_part{reward="math"} 0.75',
    ):
        assert line in lines


def test_what_is_not_known_is_left_out(snapshot):
    assert "cosmos_heldout_accuracy" not in render(snapshot, num_clients=0)


def test_names_and_numbers_that_are_out_of_the_ordinary(snapshot):
    odd = attrs.evolve(snapshot, name='a"b\\c\nd', loss=float("inf"), reward=float("nan"))
    lines = render(odd, num_clients=0).splitlines()
    assert any(line.startswith('cosmos_run_info{run="a\\"b\\\\c\\nd",') for line in lines)
    assert "cosmos_loss +Inf" in lines
    assert "cosmos_reward NaN" in lines
