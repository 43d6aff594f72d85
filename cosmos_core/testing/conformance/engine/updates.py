"""Checks of new weights: what an engine holds, updates loaded whole or not at all, and what is in flight meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import CachePolicy, Model, Request, TensorSlice
from cosmos_core.protocols.quantization import Format
from cosmos_core.testing.conformance.engine.subject import EngineDriver, Pricer, Subject, flat, refuses
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.weights import slices
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.quantization import quantise_tensors
from cosmos_core.weights.shards import ShardMap, TensorFacts, dtype_name, torch_dtype


def expect_layout(subject: Subject, engine: EngineDriver, dtype: torch.dtype, num_ranks: int) -> None:
    """Fault a layout that lacks something of the model, names something else, or gives one rank all of it."""
    layout, tensors = engine.layout(), subject.pricer.tensors(0)
    if sorted(layout) != list(range(num_ranks)):
        fault(f"the layout names ranks {sorted(layout)}; tensor_parallel asks for {num_ranks}")
    held = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in tensors.items()}
    for rank, pieces in layout.items():
        share = {name: torch.zeros_like(count) for name, count in held.items()}
        for piece, name in pieces:
            _expect_piece(piece, name, tensors, dtype)
            share[piece.name][_place_of(piece, tensors)] += 1
        for name, count in share.items():
            if count.max() > 1:
                fault(f"rank {rank} lists elements of {name!r} more than once; its slices must be disjoint")
            held[name] += count
    lacking = [name for name, count in held.items() if count.min() == 0]
    if lacking:
        fault(
            f"the layout does not cover {len(lacking)} of {len(held)} tensors: {', '.join(lacking[:3])}; list "
            "every parameter (tied ones once) and every persistent float buffer under its Hugging Face name"
        )
    sizes = {rank: sum(slices.size(piece) for piece, _ in pieces) for rank, pieces in layout.items()}
    whole = sum(math.prod(facts.shape) for facts in ShardMap.of_layout(layout).tensors.values())
    if num_ranks > 1 and max(sizes.values()) >= whole:
        fault(f"ranks hold {sizes} elements of a model of {whole}; split it, so that none holds all of it")


def _expect_piece(piece: TensorSlice, dtype: str, tensors: Mapping[str, torch.Tensor], wanted: torch.dtype) -> None:
    tensor = tensors.get(piece.name)
    if tensor is None:
        fault(f"the layout lists {piece.name!r}, which is no canonical tensor of the model, such as {min(tensors)!r}")
    if not slices.contains(slices.whole(piece.name, tuple(tensor.shape)), piece):
        fault(f"the slice {piece} does not lie in a tensor of shape {tuple(tensor.shape)}")
    if tensor.is_floating_point() and dtype.removeprefix("torch.") != dtype_name(wanted):
        fault(f"the layout gives {piece.name!r} as {dtype}, the recipe's precision is {dtype_name(wanted)}")


def expect_loaded_as(subject: Subject, engine: EngineDriver, dtype: torch.dtype) -> None:
    """Fault weights that are loaded in another precision: publishers cast to it before they compute the digest."""
    tensors, name = subject.pricer.tensors(1), dtype_name(dtype)
    if engine.load(1, tensors) != digest_of({each: tensor.to(dtype) for each, tensor in tensors.items()}):
        fault(f"with dtype {name}, the digest of loaded weights is not that of the {name} ones written")
    ((generated,),) = engine.generate([subject.request("one", 0)])
    if not subject.read.logprobs(generated).isfinite().all():
        fault(f"with dtype {name}, log-probs are {subject.read.logprobs(generated).tolist()}")


def expect_loaded(subject: Subject) -> None:
    """Fault updates that are not attested, not copied, not used at once, or refused for their version's number."""
    engine, tensors = subject.start(), {name: each.clone() for name, each in subject.pricer.tensors(1).items()}
    # The same requests before and after: what was kept of their prompts is old then.
    requests = [subject.request(index, index, num_samples=2) for index in range(3)]
    engine.generate(requests)
    digest = engine.load(6, tensors)
    if digest != digest_of(tensors):
        fault(f"commit_update() gave the digest {digest!r}, not that of what was written, {digest_of(tensors)!r}")
    if engine.stats().weight_version != 6:
        fault(f"stats().weight_version is {engine.stats().weight_version} after version 6 was committed")
    for tensor in tensors.values():
        # What was written belongs to the caller again: the engine must have copied it.
        tensor.zero_()
    results = flat(engine.generate(requests))
    subject.expect_versions(results, {6})
    subject.expect_logprobs(results, weights=1)
    # A run that is taken back to a checkpoint publishes versions again, with other weights; in parts, in any order.
    tensors = subject.pricer.tensors(2)
    engine.begin_update(5)
    for rank, piece, dtype in reversed(_parts(engine)):
        engine.write(rank, piece, tensors[piece.name][_place_of(piece, tensors)].to(torch_dtype(dtype)))
    if engine.commit_update() != digest_of(tensors):
        fault("an update that was written in halves was not loaded as it was written")
    results = flat(engine.generate(requests))
    subject.expect_versions(results, {5})
    subject.expect_logprobs(results, weights=2)


def expect_whole_updates(subject: Subject) -> None:
    """Fault updates that are loaded in part, or that a late or repeated call loads though nobody published them."""
    engine, tensors = subject.start(), subject.pricer.tensors(1)
    refuses(WeightSyncError, engine.commit_update, "commit_update() without begin_update()")
    engine.begin_update(2)
    refuses(WeightSyncError, lambda: engine.begin_update(3), "begin_update() while an update is open")
    layout = engine.layout()
    first, _ = next(iter(layout.values()))[0]
    refuses(
        WeightSyncError,
        lambda: engine.write(max(layout) + 1, first, torch.zeros(first.shape)),
        "write() for a rank that the layout does not have",
    )
    engine.write_all(tensors, skip=1)
    refuses(WeightSyncError, engine.commit_update, "an update that lacks one slice")
    _expect_first_weights(subject, engine, "after a refused update")
    engine.abort_update()
    engine.abort_update()
    _expect_first_weights(subject, engine, "after abort_update()")
    parts = _parts(engine)
    alike = (index for index in range(1, len(parts)) if parts[index][1].shape == parts[index - 1][1].shape)
    if (twice := next(alike, None)) is not None:
        # Counting bytes is not enough: a retry sends a slice again.
        engine.begin_update(1)
        for index, (rank, piece, dtype) in enumerate(parts):
            again = parts[index - 1][1] if index == twice else piece
            engine.write(rank, again, tensors[again.name][_place_of(again, tensors)].to(torch_dtype(dtype)))
        refuses(WeightSyncError, engine.commit_update, "an update with one slice twice and another missing")
        engine.abort_update()
    for weights in (1, 2):
        if engine.load(2, subject.pricer.tensors(weights)) != digest_of(subject.pricer.tensors(weights)):
            fault(
                "a whole update after an aborted one gives another digest; abort_update() must forget what was written"
            )


def _expect_first_weights(subject: Subject, engine: EngineDriver, when: str) -> None:
    if engine.stats().weight_version != 0:
        fault(f"stats().weight_version is {engine.stats().weight_version} {when}; what was loaded stays loaded")
    results = flat(engine.generate([subject.request(when, 0)]))
    subject.expect_versions(results, {0})
    subject.expect_logprobs(results)


def expect_update_in_flight(
    subject: Subject,
    requests: Sequence[Request],
    *,
    cache: CachePolicy,
    loads: Mapping[int, int],
    units: int,
    **changes: int,
) -> None:
    """Fault updates that lose something in flight, make it again, or mistake which weights made a unit.

    Args:
        subject: The engine, how it is asked and how it is read.
        requests: In flight, as long as possible.
        cache: What becomes of the cache.
        loads: The weights of each version that is loaded, the first in a pause, others while the engine generates.
        units: Units after which the first is loaded.
        changes: Of the engine's context.
    """
    engine = subject.start(**changes)
    handles = engine.submit(requests)
    before = engine.pause_in_flight(handles, units)
    stats = engine.stats()
    # Prompts may enter in pieces, so that the last ones have not begun; samples of a group may be counted as one.
    if (held := stats.num_running + stats.num_waiting) < len(requests):
        fault(f"stats() counts {held} running and waiting with {len(requests)} requests in flight")
    for number, (version, weights) in enumerate(loads.items()):
        if number:
            engine.wait_for_units(before + 40 * number)
        if engine.load(version, subject.pricer.tensors(weights), cache) != digest_of(subject.pricer.tensors(weights)):
            fault("commit_update() under requests in flight gave a digest that is not that of what was written")
        engine.resume()
    results = flat(map(engine.results, handles))
    subject.expect_whole(results, "was in flight over an update")
    made, told = sum(each.num_units for each in results), engine.stats().generated_units
    if made != told:
        fault(
            f"{told} units were generated for completions of {made}: an update made some of them again; what was "
            "generated stays"
        )
    subject.expect_versions(results, {0, *loads})
    old = sum(subject.read.versions(generated).count(0) for generated in results)
    if old != before:
        fault(
            f"{before} units were generated before the first update, but {old} carry the old version; a unit "
            "carries the version of the weights that made it"
        )
    if not all(subject.read.logprobs(generated).isfinite().all() for generated in results):
        fault(f"after an update with cache={cache!r}, some log-probs are not finite")
    is_exact = cache == "recompute" or not subject.read.has_cache
    for version, weights in {0: 0, **loads}.items():
        # Over a kept cache, units of new weights follow what the old ones left: no trainer's, but in fresh samples.
        those = results if is_exact or not weights else [each for each in results if each.oldest_version == version]
        subject.expect_logprobs(those, weights=weights, version=version)


def expect_fresh_samples(subject: Subject) -> None:
    """Fault samples that start after an update and use something older: others of their group go on with it."""
    engine, units = subject.start(max_in_flight=2), subject.read.long_units
    # The first request makes room for the group's second sample while the first one is still going on.
    first = subject.request("first", 0, max_units=units // 2)
    group = subject.request("group", 1, max_units=units, num_samples=3)
    handles = engine.submit([first, group])
    engine.pause_in_flight(handles, 10)
    engine.load(1, subject.pricer.tensors(1), "keep")
    engine.resume()
    fresh = [generated for generated in engine.results(handles[1]) if generated.oldest_version == 1]
    if not fresh:
        fault("of 4 samples in 2 slots, none started after an update that came early; do they all carry version 0?")
    subject.expect_logprobs(fresh, weights=1)


def expect_quantised(subject: Subject, model: Model, form: Format) -> None:
    """Fault matrices that are not held, attested and computed with as what codes and scales stand for."""
    matrices, engine = model.facts().matrices, subject.start(quantization=form.name)
    rounded = attrs.evolve(subject, pricer=Pricer(model, seed=1, form=form))
    first, second = (quantise_tensors(form, subject.pricer.tensors(weights), matrices) for weights in (0, 1))
    expected = {
        name: TensorFacts(shape=tuple(each.shape), dtype=dtype_name(each.dtype)) for name, each in first.items()
    }
    found = ShardMap.of_layout(engine.layout()).tensors
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            fault(
                f"with quantization {form.name}, the layout gives {name!r} as {found.get(name)}; it is published as "
                f"{expected.get(name)}: see `Format.tensors` and `ModelFacts.matrices`"
            )
    requests = [subject.request(index, index, num_samples=2) for index in range(3)]
    rounded.expect_logprobs(flat(engine.generate(requests)))
    digest = engine.load(1, second)
    if digest != digest_of(second):
        fault(
            f"with quantization {form.name}, commit_update() gave the digest {digest!r}, not that of the codes, "
            f"scales and other tensors that were written, {digest_of(second)!r}"
        )
    rounded.expect_logprobs(flat(engine.generate(requests)), weights=1)


def _place_of(piece: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> tuple[slice, ...]:
    return slices.within(piece, slices.whole(piece.name, tuple(tensors[piece.name].shape)))


def _parts(engine: EngineDriver) -> list[tuple[int, TensorSlice, str]]:
    """(rank, slice, dtype) of the layout, each slice in two halves."""
    return [
        (rank, part, dtype)
        for rank, held in engine.layout().items()
        for piece, dtype in held
        for part in slices.chunks(piece, max(1, slices.size(piece) // 2))
    ]
