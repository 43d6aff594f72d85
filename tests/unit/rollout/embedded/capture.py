"""A stand-in for CUDA graphs: it notes operators with their tensors, and computes them again where these lie."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "lift_fresh"}
"""Operators that wait for the device, and that of tensors which the host makes of numbers of its own."""


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def place(tensor):
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """What is called within it; nothing that was there before is changed in the end."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.before = {}
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        masks = [each for each in tensors(args[1:]) if each.dtype == torch.bool] if name.startswith("index") else []
        if name in WAITING or masks:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}\nsecond line")
        given = {place(each) for each in tensors((args, kwargs))}
        if func._schema.is_mutable:
            for each in tensors((args, kwargs)):
                if place(each) not in self.made:
                    storage = each.untyped_storage()
                    self.before.setdefault(place(each), (storage, storage.clone()))
        result = func(*args, **kwargs)
        results = [each for each in tensors(result) if place(each) not in given]
        self.made |= {place(each) for each in results}
        self.calls.append((func, args, kwargs, results, given))
        return result

    def __exit__(self, *error):
        super().__exit__(*error)
        for storage, content in self.before.values():
            storage.copy_(content)

    def replay(self):
        for func, args, kwargs, results, given in self.calls:
            again = tensors(func(*args, **kwargs))
            for old, new in zip(results, [each for each in again if place(each) not in given], strict=True):
                old.copy_(new)


class StandIn:
    """`graphs.Capture` on a CPU; `counts` has what was done, of all devices together."""

    counts = None

    def __init__(self, _device):
        self.counts["streams"] += 1

    def renew(self):
        self.counts["pools"] += 1

    def warm_up(self, compute):
        return compute()

    def capture(self, compute):
        self.counts["captures"] += 1
        with Recording() as recording:
            result = compute()

        def replay():
            self.counts["replays"] += 1
            recording.replay()

        return replay, result


class Rerun(StandIn):
    """One that calls the function again: torch compiles nothing while operators are noted."""

    def warm_up(self, compute):
        self.shaped = compute()
        return self.shaped

    def capture(self, compute):
        result = torch.empty_like(self.shaped)
        return lambda: self.counts.update(replays=1) or result.copy_(compute()), result
