from types import SimpleNamespace

from cosmos_core.run.report.summary import begun_and_ended, own_measures


def test_what_is_not_measured_of_every_run_is_told():
    metrics = {
        "loss": 1.0,
        "ratio": 1.5,
        "step_s": 2.0,
        "imitation_loss": 0.25,
        "imitation_data_loss": 0.5,
        "imitation_units": 8.0,
        "imitation_dropped_bad_row": 3.0,
    }
    steps = [SimpleNamespace(record=SimpleNamespace(step=step, metrics=metrics)) for step in (1, 2)]
    found = own_measures(steps)
    assert {*found} == {"ratio", "imitation_loss", "imitation_data_loss", "imitation_dropped_bad_row"}
    assert found["imitation_loss"] == [(1.0, 0.25), (2.0, 0.25)]
    assert begun_and_ended(steps)["imitation_loss"] == {"first": 0.25, "last": 0.25}
