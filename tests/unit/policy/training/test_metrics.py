import math

import torch

from cosmos_core.policy.training.metrics import Meter, Stopwatch
from cosmos_core.weights.staging import Beside, settle


def test_means_sums_and_maxima_over_replicas():
    first, second = Meter(), Meter()
    first.add("kl", 3.0, 3)
    second.add("kl", 5.0, 1)
    first.add("loss", 0.25)
    second.add("loss", 0.5)
    first.peak("time_s", 1.0)
    second.peak("time_s", 2.0)
    second.add("seen by one", 4.0, 2)
    merged = Meter.merged([first.encode(), second.encode()])
    assert merged.report() == {"kl": 2.0, "loss": 0.75, "time_s": 2.0, "seen by one": 2.0}


def test_values_that_are_not_finite_survive():
    meter = Meter()
    meter.add("loss", math.nan)
    meter.peak("norm", math.inf)
    report = Meter.merged([meter.encode()]).report()
    assert math.isnan(report["loss"])
    assert report["norm"] == math.inf


def test_a_stopwatch_waits_for_the_step_and_not_for_copies_beside_it(streams, monkeypatch):
    did, device = [], torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    with Stopwatch(device)("step_s"):
        streams.now.ask(lambda: did.append("step"))
        Beside().do(device, lambda: did.append("copy"))
    assert did == ["step"]
    settle()
    assert did == ["step", "copy"]


def test_a_stopwatch_adds_up():
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch("a"):
            pass
    watch.add("b", 3.0)
    assert watch.seconds["b"] == 3.0
    assert 0.0 <= watch.seconds["a"] < 1.0
