import json

import pytest

from cosmos_core.control.page.application import request_from
from cosmos_core.errors import TransportError
from cosmos_core.transport.messages import REQUEST, Drain, Set, Stop


def test_the_requests_of_the_command_line(subtests):
    for body, request_ in [
        (b'{"do": "stop"}', Stop()),
        (b'{"do": "drain", "name": "rollout-1"}', Drain(name="rollout-1")),
        (b'{"do": "set", "overrides": ["a.b=1", "c=x"]}', Set(overrides=("a.b=1", "c=x"))),
    ]:
        with subtests.test(body=body):
            assert request_from(body) == request_


def test_an_override_may_be_as_long_as_the_controller_takes_it():
    longest = "a.b=" + "x" * 252
    decoded = REQUEST.decode(REQUEST.encode(request_from(json.dumps({"do": "set", "overrides": [longest]}).encode())))
    assert decoded == Set(overrides=(longest,))
    with pytest.raises(TransportError, match="256"):
        request_from(json.dumps({"do": "set", "overrides": [longest + "x"]}).encode())


def test_what_only_plugins_can_judge_is_left_to_the_command(subtests):
    for override in [
        "algorithm.options.clip_high=1",
        "warmup.options.x=1",
        "rollout.sampling.temperature=2",
        " sync.max_staleness = 1",
    ]:
        with subtests.test(override=override):
            body = json.dumps({"do": "set", "overrides": ["policy.optimizer.lr=1", override]}).encode()
            with pytest.raises(TransportError, match=r"only the run's algorithm can judge .*use `cosmos set "):
                request_from(body)


def test_anything_else_is_refused(subtests):
    for body in [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"do": "lost", "name": "a", "incarnation": "b", "reason": "c"}',
        b'{"do": "drain"}',
        b'{"do": "drain", "name": ""}',
        b'{"do": "drain", "name": 1}',
        b'{"do": "drain", "name": "a", "more": 1}',
        b'{"do": "set", "overrides": []}',
        b'{"do": "set", "overrides": "a=1"}',
        b'{"do": "stop"} {"do": "stop"}',
        b"\xff\xfe",
        b'{"do": "drain", "name": "\xff"}',
        b"[" * 10_000,
        b'{"do": "set", "overrides": [' + b",".join([b'"a=1"'] * 33) + b"]}",
    ]:
        with subtests.test(body=body), pytest.raises(TransportError, match="not a request of a run"):
            request_from(body)
