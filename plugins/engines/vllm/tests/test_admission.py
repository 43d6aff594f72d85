"""Who is let into vLLM, with a stand-in that notes what it is given."""

import itertools

import numpy as np
import pytest

from cosmos_core.protocols import Request, Sampling
from cosmos_core.rollout.serving.requests import ServedHandle
from cosmos_core.rollout.serving.tokens import TokenRequestState
from cosmos_core.types import Array, Payload
from cosmos_engine_vllm.admission import Admission


class Noting:
    def __init__(self):
        self.entered = []
        self.dropped = []
        self.shown = []
        self._numbers = itertools.count()

    def add(self, prompt, sampling, *, seed, epoch, shows):
        self.shown.append(shows)
        name = str(next(self._numbers))
        self.entered.append((name, tuple(prompt), seed, epoch))
        return name

    def drop(self, names):
        self.dropped.extend(names)


@pytest.fixture
def backend():
    return Noting()


def parent(number, *, priority=0, num_samples=1):
    prompt = Payload(
        kind="tokens", arrays={"prompt": Array(dtype="int32", shape=(1,), data=np.int32(number).tobytes())}
    )
    sampling = Sampling(num_samples=num_samples)
    request = Request(request_id=str(number), prompt=prompt, sampling=sampling, seed=number, priority=priority)
    return TokenRequestState(request, ServedHandle(request), number, [number])


def test_no_more_enter_than_can_start_and_in_their_order(backend):
    admission = Admission(backend, num_slots=2)
    for each in (parent(1, priority=5), parent(2), parent(3, priority=-1), parent(4)):
        admission.add(each.samples)
    admission.admit()
    assert [prompt for _, prompt, _, _ in backend.entered] == [(3,), (2,)]
    assert (admission.num_running, admission.num_waiting) == (2, 2)
    admission.remove([admission.of("0")])
    admission.admit()
    assert [prompt for _, prompt, _, _ in backend.entered] == [(3,), (2,), (4,)]


def test_each_sample_of_a_group_has_a_seed_of_its_own_that_vllm_takes(backend):
    admission = Admission(backend, num_slots=8)
    admission.add(parent(1, num_samples=8).samples)
    admission.admit()
    seeds = {seed for _, _, seed, _ in backend.entered}
    assert len(seeds) == 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_an_update_lets_those_enter_anew_that_have_generated_nothing(backend):
    admission = Admission(backend, num_slots=2)
    one, other = parent(1), parent(2)
    admission.add([*one.samples, *other.samples])
    admission.admit()
    (going,) = one.samples
    going.tokens.append(7)
    going.logprobs.append(-0.5)
    admission.mark(3)
    # The one that goes on keeps what is cached; the other one's prompt may have been computed under the old weights.
    assert backend.dropped == ["1"]
    assert [(prompt, epoch) for _, prompt, _, epoch in backend.entered] == [((1,), 0), ((2,), 0), ((2,), 1)]
    assert admission.of("0") is going
    assert going.spans == [(0, 0), (1, 3)]
    assert other.samples[0].spans == [(0, 3)]


def test_the_same_version_loaded_twice_shares_nothing(backend):
    admission = Admission(backend, num_slots=1)
    for number in range(3):
        admission.mark(1)
        admission.add(parent(number).samples)
        admission.admit()
        admission.remove([admission.of(str(number))])
    assert len({epoch for _, _, _, epoch in backend.entered}) == 3


def test_what_a_prompt_shows_goes_in_with_each_sample_and_again_after_an_update(backend):
    admission = Admission(backend, num_slots=3)
    one, other = parent(1, num_samples=2), parent(2)
    shown = object()
    one.conditioning = shown
    admission.add([*one.samples, *other.samples])
    admission.admit()
    assert backend.shown == [shown, shown, None]
    admission.mark(1)
    assert backend.shown[3:] == [shown, shown, None]
    assert [epoch for *_, epoch in backend.entered] == [0, 0, 0, 1, 1, 1]
