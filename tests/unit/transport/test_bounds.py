"""What a message may hold: what cannot be is refused, and named."""

import math

import attrs
import msgspec
import pytest

from cosmos_core.errors import TransportError
from cosmos_core.transport.bounds import fitted
from cosmos_core.transport.messages import UP, Beat, Hello
from cosmos_core.transport.reports import REPORT, Failed, GroupFinished, StepDone
from cosmos_core.types import Sample, SampleStatus
from cosmos_core.types.bounds import TEXT

HELLO = Hello(wire=2, run_id="r", name="n", role="policy", incarnation="i", host="h", pid=1, step=-1, endpoints={})
BEAT = Beat(name="n", incarnation="i", term=1, revision=0, gauges={})
SAMPLE = Sample(
    index=0, status=SampleStatus.OK, reward=1.0, rewards={"math": 1.0}, oldest_version=0, newest_version=0, num_units=1,
    num_prompt_units=1,
)  # fmt: skip
DONE = StepDone(step=1, attempt=1, generation=1, skipped=False, metrics={"loss": math.nan})


def test_what_cannot_be_is_named(subtests):
    for message, where in [
        (attrs.evolve(HELLO, step=-2), r"\$\.step"),
        (attrs.evolve(HELLO, pid=-1), r"\$\.pid"),
        (attrs.evolve(HELLO, name="a\nb"), r"\$\.name"),
        (attrs.evolve(HELLO, host="\x1b[2J"), r"\$\.host"),
        (attrs.evolve(HELLO, name="x" * 257), r"\$\.name"),
        (attrs.evolve(HELLO, endpoints={"weights": "a\u2028"}), r"\$\.endpoints"),
        (attrs.evolve(BEAT, gauges={"x": math.nan}), r"\$\.gauges"),
        (attrs.evolve(BEAT, gauges={"x": -math.inf}), r"\$\.gauges"),
        (attrs.evolve(BEAT, gauges={"x\r": 1.0}), r"\$\.gauges"),
        (attrs.evolve(BEAT, term=2**60), r"\$\.term"),
    ]:
        with subtests.test(message=message, where=where), pytest.raises(TransportError, match=where):
            UP.decode(UP.encode(message))


def test_what_can_be_passes(subtests):
    for message in [HELLO, BEAT, attrs.evolve(BEAT, gauges={"x": -1.5})]:
        with subtests.test(message=message):
            assert UP.decode(UP.encode(message)) == message


def test_reports_are_bounded_too_and_a_loss_may_be_nan():
    assert math.isnan(REPORT.decode(REPORT.encode(DONE)).metrics["loss"])
    with pytest.raises(TransportError, match=r"\$\.step"):
        REPORT.decode(REPORT.encode(attrs.evolve(DONE, step=-7)))
    with pytest.raises(TransportError, match=r"\$\.reason"):
        REPORT.decode(REPORT.encode(Failed(reason="x" * (TEXT + 1))))


def test_a_sample_is_what_a_sample_can_be(subtests):
    report = GroupFinished(lease=1, samples=(SAMPLE,))
    assert REPORT.decode(REPORT.encode(report)) == report
    for changes, where in [
        ({"reward": math.nan}, "reward"),
        ({"rewards": {"math": math.inf}}, "rewards"),
        ({"rewards": {"a\x00b": 1.0}}, "rewards"),
        ({"rewards": {"x" * 300: 1.0}}, "rewards"),
        ({"num_units": -1}, "num_units"),
        ({"num_prompt_units": 2**60}, "num_prompt_units"),
        ({"oldest_version": -2}, "oldest_version"),
        ({"status": "excellent"}, "status"),
        ({"index": 1.5}, "index"),
        ({"detail": "d" * (TEXT + 1)}, "detail"),
    ]:
        sample = attrs.evolve(SAMPLE, **changes)
        with subtests.test(changes=changes), pytest.raises(TransportError, match=where):
            REPORT.decode(REPORT.encode(attrs.evolve(report, samples=(sample,))))


def test_long_texts_are_cut_wherever_they_are():
    sample = attrs.evolve(SAMPLE, status=SampleStatus.REWARD_FAILED, reward=None, rewards={}, detail="d" * 2 * TEXT)
    report = fitted(GroupFinished(lease=1, samples=(sample, attrs.evolve(sample, detail="short"))))
    assert [len(each.detail) for each in report.samples] == [TEXT, 5]
    assert report.samples[0].detail.endswith("d…")
    assert report.samples[0].status is SampleStatus.REWARD_FAILED
    assert REPORT.decode(REPORT.encode(report)) == report
    assert fitted(Failed(reason="a\nb")) == Failed(reason="a\nb")
    done = fitted(attrs.evolve(DONE, metrics={}, details={"bad_row": "d" * 2 * TEXT}))
    assert len(done.details["bad_row"]) == TEXT
    assert fitted(Failed(reason="\udcff")) == Failed(reason="?")
    assert fitted(attrs.evolve(done, details={"\udcff": "x"})).details == {"?": "x"}


def test_the_decoder_does_not_make_room_for_what_is_only_announced():
    for header in (b"\xdf", b"\xdd", b"\xc6"):
        with pytest.raises(TransportError):
            UP.decode(b"\x92\xa5Hello" + header + b"\xff\xff\xff\xff")
    with pytest.raises(TransportError):
        UP.decode(msgspec.msgpack.encode(["Hello"]) + b"\x91" * 100_000)
