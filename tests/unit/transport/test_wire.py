from __future__ import annotations

import random
from typing import get_args

import attrs
import msgspec
import pytest

from cosmos_core.errors import TransportError
from cosmos_core.transport import directives, messages, reports
from cosmos_core.transport.messages import DOWN, UP
from cosmos_core.transport.reports import REPORT
from cosmos_core.types import Sample, SampleStatus

SAMPLE = Sample(
    index=0,
    status=SampleStatus.OK,
    reward=0.5,
    rewards={"math": 0.5},
    oldest_version=1,
    newest_version=2,
    num_units=7,
    num_prompt_units=3,
)
GROUP = directives.GroupRef(position=4, row=2, lease=9, endpoint="tcp://a:1/t", samples=(SAMPLE,))
POLICY = directives.PolicyDirective(
    generation=directives.GenerationOrder(
        generation=1, members=("policy-0",), store="tcp://a:2", source=0, transfer=False
    ),
    train=directives.TrainOrder(step=1, attempt=1, stage=0, groups=(GROUP,), shares=((0,),), publish=True),
    publish=0,
    retain=0,
    checkpoint=-1,
    stop=False,
)
ROLLOUT = directives.RolloutDirective(
    weights=directives.WeightTarget(version=1, digest="d", sources=("tcp://a:3",), hosts=("h",)),
    leases=(directives.Lease(lease=1, purpose="train", position=1, row=1, version=-1),),
    hold=(3, 4),
    stop=False,
)
MESSAGES = [
    (
        UP,
        messages.Hello(
            wire=1,
            run_id="r",
            name="policy-0",
            role="policy",
            incarnation="i",
            host="h",
            pid=1,
            step=0,
            endpoints={"store": "tcp://a:2"},
        ),
    ),
    (UP, messages.Beat(name="n", incarnation="i", term=1, revision=3, gauges={"load": 0.5})),
    (UP, messages.Reports(name="n", incarnation="i", term=1, first=1, reports=(b"\x00\xff",))),
    (DOWN, messages.Directive(term=1, revision=2, acknowledged=3, policy=POLICY)),
    (DOWN, messages.Directive(term=1, revision=2, acknowledged=3, rollout=ROLLOUT)),
    (DOWN, messages.Notices(entries=((1, 2.5, b"x"),), last=1, gauges={"controller": {"queue": 1.0}})),
    (REPORT, reports.GroupFinished(lease=1, samples=(SAMPLE,), drop="no spread")),
    (REPORT, reports.Troubled(what="late", number=3, last="why")),
    (
        REPORT,
        reports.StepDone(
            step=1,
            attempt=1,
            generation=1,
            skipped=False,
            metrics={"loss": 1.0},
            dropped=((4, "bad"),),
            details={"bad": "row 4"},
        ),
    ),
]


def test_a_message_survives_the_wire(subtests):
    for codec, message in MESSAGES:
        with subtests.test(codec=codec, message=message):
            assert codec.decode(memoryview(codec.encode(message))) == message


def test_a_codec_knows_exactly_its_direction(subtests):
    for codec, union in [(UP, messages.Up), (DOWN, messages.Down), (REPORT, reports.Report)]:
        with subtests.test(codec=codec, union=union):
            known = {cls.__name__ for cls in get_args(union)}
            with pytest.raises(TransportError) as caught:
                codec.decode(msgspec.msgpack.encode(["Nothing", {}]))
            assert str(caught.value) == f"message 'Nothing' is not one of {', '.join(sorted(known))}"
    with pytest.raises(TransportError, match="'Welcome' is not one of"):
        UP.decode(DOWN.encode(messages.Welcome(term=1, acknowledged=0)))


def test_nothing_is_coerced_and_nothing_may_be_missing(subtests):
    for fields in [
        {"term": "1", "acknowledged": 0},
        {"term": 1.5, "acknowledged": 0},
        {"term": 1},
        {"term": None, "acknowledged": 0},
    ]:
        with subtests.test(fields=fields), pytest.raises(TransportError, match="malformed message"):
            DOWN.decode(msgspec.msgpack.encode(["Welcome", fields]))


def test_mutants_raise_transport_errors_and_nothing_else():
    rng = random.Random(7)
    refused = 0
    for _ in range(4000):
        codec, message = MESSAGES[rng.randrange(len(MESSAGES))]
        data = _mutate(codec.encode(message), rng)
        try:
            decoded = codec.decode(data)
        except TransportError:
            refused += 1
        else:
            assert attrs.has(type(decoded))
    assert refused > 2000


def _mutate(data: bytes, rng: random.Random) -> bytes:
    mutant = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(4)
        at = rng.randrange(len(mutant)) if mutant else 0
        if kind == 0 and mutant:
            mutant[at] = rng.randrange(256)
        elif kind == 1:
            del mutant[at : at + rng.randint(1, 8)]
        elif kind == 2:
            mutant[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            del mutant[at:]
    return bytes(mutant)
