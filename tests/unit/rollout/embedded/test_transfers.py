"""The device is waited for once in a step: on a GPU each wait costs more than a small model's kernels."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor for which the host waits."""
VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "lift_fresh")
"""Operators whose result depends on values, and that of `torch.tensor`, which copies from the host."""


class Watch(TorchDispatchMode):
    """Counts operators that wait for the device, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in VALUES or masks:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "kind",
    [{}, {"temperature": 0.5, "top_k": 4, "top_p": 0.9}, {"temperature": 0.0}],
    ids=["plain", "bounded", "greedy"],
)
def test_a_step_that_only_decodes_waits_once(kit, make, monkeypatch, kind):
    engine, waits, steps = make(kit.FakeModel(stop_ids=frozenset())), Counter(), []
    for name in WAITS:
        own = getattr(torch.Tensor, name)

        def counted(tensor, *args, own=own, name=name):
            waits[name] += 1
            return own(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    advance, plan = engine._advance, engine._scheduler.plan

    def planned():
        made = plan()
        steps.append((not made.chunks and not made.forks, waits.copy(), watch.found.copy()))
        return made

    watch = Watch()

    def watched():
        with watch:
            advance()

    engine._scheduler.plan, engine._advance = planned, watched
    handles = engine.submit([kit.request(i, p, seed=i, max_units=9, **kind) for i, p in enumerate(kit.ragged(3))])
    for handle in handles:
        handle.result(20)
    spent = [
        (later[1] - earlier[1], later[2] - earlier[2])
        for earlier, later in itertools.pairwise(steps)
        if earlier[0] and later[0]
    ]
    assert len(spent) > 4
    assert all(each == (Counter(tolist=1), Counter()) for each in spent), spent
