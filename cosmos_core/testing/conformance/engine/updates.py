"""Tests of new weights: what an engine holds, updates loaded whole or not at all, and what is in flight meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import CachePolicy, EngineCapabilities, Model, Request, TensorSlice
from cosmos_core.protocols.quantization import FORMATS, Format
from cosmos_core.testing.conformance.engine.subject import (
    EngineDriver,
    Pricer,
    Readings,
    Subject,
    flat,
    place_of,
    refuses,
)
from cosmos_core.testing.conformance.plugin import fault, needs
from cosmos_core.weights import slices
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.quantization import quantise_tensors
from cosmos_core.weights.shards import ShardMap, dtype_name


class UpdateTests(Readings):
    """Tests of new weights."""

    tensor_parallel: ClassVar[int] = 1

    def test_the_layout_covers_each_tensor_once(self, subject: Subject, capabilities: EngineCapabilities) -> None:
        """The replica fetches what it names, in the recipe's precision; no rank may need memory for all of it."""
        if self.tensor_parallel > 1 and "tp" not in capabilities.mesh_axes:
            fault(f"tensor_parallel is {self.tensor_parallel}, and mesh_axes does not declare tp: declare it")
        for dtype in (torch.float32, torch.bfloat16):
            engine, tensors, name = subject.start(dtype=dtype), subject.pricer.tensors(1), dtype_name(dtype)
            self._expect_layout(engine, tensors, name)
            digest, published = engine.load(1, tensors), {each: value.to(dtype) for each, value in tensors.items()}
            _expect_digest(digest, published, f"in {name}, to which publishers cast before they compute it")
            ((generated,),) = engine.generate([subject.request("one", 0)])
            if not self.logprobs(generated).isfinite().all():
                fault(f"with dtype {name}, log-probs are {self.logprobs(generated).tolist()}")

    def _expect_layout(self, engine: EngineDriver, tensors: Mapping[str, torch.Tensor], dtype: str) -> None:
        layout = engine.layout()
        if sorted(layout) != list(range(self.tensor_parallel)):
            fault(f"the layout names ranks {sorted(layout)}; tensor_parallel asks for {self.tensor_parallel}")
        covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
        sizes = {}
        for rank, pieces in layout.items():
            share = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in tensors.items()}
            for piece, told in pieces:
                _expect_piece(piece, told, tensors, dtype)
                share[piece.name][place_of(piece, tensors)] += 1
            if twice := [name for name, count in share.items() if count.max() > 1]:
                fault(f"rank {rank} lists elements of {twice[0]!r} more than once; its slices must be disjoint")
            for name, count in share.items():
                covered[name] |= count > 0
            sizes[rank] = sum(slices.size(piece) for piece, _ in pieces)
        if lacking := [name for name, is_there in covered.items() if not is_there.all()]:
            fault(
                f"the layout does not cover {len(lacking)} of {len(tensors)} tensors: {', '.join(lacking[:3])}; list "
                "every parameter (tied ones once) and every persistent float buffer under its Hugging Face name"
            )
        whole = sum(tensor.numel() for tensor in tensors.values())
        if self.tensor_parallel > 1 and max(sizes.values()) >= whole:
            fault(f"ranks hold {sizes} elements of a model of {whole}; split it, so that none holds all of it")

    def test_an_update_is_loaded_and_attested(self, subject: Subject) -> None:
        """Nothing is served on a version whose digest is not the published one; an older one may come again."""
        engine, tensors = subject.start(), {name: each.clone() for name, each in subject.pricer.tensors(1).items()}
        # The same requests before and after: what was kept of their prompts is old then.
        requests = [subject.request(index, index, num_samples=2) for index in range(3)]
        engine.generate(requests)
        _expect_digest(engine.load(6, tensors), tensors, "of whole slices")
        if engine.stats().weight_version != 6:
            fault(f"stats().weight_version is {engine.stats().weight_version} after version 6 was committed")
        for tensor in tensors.values():
            # What was written belongs to the caller again: the engine must have copied it.
            tensor.zero_()
        _expect_weights(subject, engine, requests, 6, weights=1)
        # A run that is taken back to a checkpoint publishes versions again, with other weights; in parts, in any order.
        tensors = subject.pricer.tensors(2)
        engine.begin_update(5)
        engine.write_all(tensors, reversed(engine.parts(2)))
        _expect_digest(engine.commit_update(), tensors, "written in halves")
        _expect_weights(subject, engine, requests, 5, weights=2)

    def test_an_incomplete_update_is_refused_and_nothing_changes(self, subject: Subject) -> None:
        """Half-loaded weights would generate something that no trainer can price."""
        engine, tensors = subject.start(), subject.pricer.tensors(1)
        refuses(WeightSyncError, "commit_update() without begin_update()", engine.commit_update)
        engine.begin_update(2)
        refuses(WeightSyncError, "begin_update() while an update is open", engine.begin_update, 3)
        foreign = [(max(engine.layout()) + 1, piece, dtype) for _, piece, dtype in engine.parts()[:1]]
        write = "write() for a rank that the layout does not have"
        refuses(WeightSyncError, write, engine.write_all, tensors, foreign)
        engine.write_all(tensors, engine.parts()[1:])
        refuses(WeightSyncError, "an update that lacks one slice", engine.commit_update)
        request = [subject.request("after a refused update", 0)]
        _expect_weights(subject, engine, request, 0)
        engine.abort_update()
        engine.abort_update()
        _expect_weights(subject, engine, request, 0)
        parts = engine.parts(2)
        alike = (index for index in range(1, len(parts)) if parts[index][1].shape == parts[index - 1][1].shape)
        if (twice := next(alike, None)) is not None:
            # Counting bytes is not enough: a retry sends a slice again.
            parts[twice] = parts[twice - 1]
            engine.begin_update(1)
            engine.write_all(tensors, parts)
            refuses(WeightSyncError, "an update with one slice twice and another missing", engine.commit_update)
            engine.abort_update()
        for weights in (1, 2):
            tensors = subject.pricer.tensors(weights)
            _expect_digest(engine.load(2, tensors), tensors, "after an aborted one, which abort_update() must forget")

    def test_an_update_in_flight_loses_and_restarts_nothing(self, subject: Subject) -> None:
        """Generation goes on over updates; each unit tells which weights made it."""
        # More samples than slots: some start after the updates, with nothing of the old weights.
        requests = subject.long(3, num_samples=2)
        # Over a kept cache, the same weights as before change nothing.
        _expect_update_in_flight(subject, requests, cache="keep", loads={3: 0, 4: 4}, units=40)
        _expect_update_in_flight(subject, requests, cache="recompute", loads={3: 3, 4: 4}, units=40)

    def test_an_update_under_64_sequences_in_flight(self, subject: Subject) -> None:
        """None is lost, none restarted, and each unit has the version and the log-prob of the weights that made it."""
        units, requests = 64 * self.long_units // 3, subject.long(64)
        _expect_update_in_flight(subject, requests, cache="keep", loads={5: 1}, units=units, max_in_flight=64)
        _expect_update_in_flight(subject, requests, cache="recompute", loads={5: 1}, units=units, max_in_flight=64)

    def test_a_sample_that_starts_after_an_update_uses_nothing_older(self, subject: Subject) -> None:
        """Whatever is shared with the samples that started before: they go on with the old prompt, it must not."""
        needs(subject.capabilities.in_flight_update, "in_flight_update")
        engine = subject.start(max_in_flight=2)
        # The first request makes room for the group's second sample while the first one is still going on.
        first = subject.request("first", 0, max_units=self.long_units // 2)
        group = subject.request("group", 1, max_units=self.long_units, num_samples=3)
        handles = engine.submit([first, group])
        engine.pause_in_flight(handles, 10)
        engine.load(1, subject.pricer.tensors(1), "keep")
        engine.resume()
        fresh = [generated for generated in engine.results(handles[1]) if generated.oldest_version == 1]
        if not fresh:
            fault("of 4 samples in 2 slots, none started after an update that came early; do they all carry version 0?")
        subject.expect_logprobs(fresh, weights=1)

    def test_quantised_weights_are_loaded_attested_and_computed_with(self, subject: Subject, model: Model) -> None:
        """The trainer can only correct for what it knows; a matrix in full would be sent in vain, and not attested."""
        needs(subject.capabilities.quantizations, "quantizations")
        for name, form in FORMATS.items():
            if name in subject.capabilities.quantizations:
                _expect_quantised(subject, model, form)


def _expect_piece(piece: TensorSlice, dtype: str, tensors: Mapping[str, torch.Tensor], wanted: str) -> None:
    tensor = tensors.get(piece.name)
    if tensor is None:
        fault(f"the layout lists {piece.name!r}, which is no canonical tensor of the model, such as {min(tensors)!r}")
    if not slices.contains(slices.whole(piece.name, tuple(tensor.shape)), piece):
        fault(f"the slice {piece} does not lie in a tensor of shape {tuple(tensor.shape)}")
    if tensor.is_floating_point() and dtype.removeprefix("torch.") != wanted:
        fault(f"the layout gives {piece.name!r} as {dtype}, the recipe's precision is {wanted}")


def _expect_digest(digest: str, written: Mapping[str, torch.Tensor], which: str) -> None:
    if digest != digest_of(written):
        fault(
            f"commit_update() gave the digest {digest!r}, not that of what was written, {digest_of(written)!r} "
            f"(an update {which})"
        )


def _expect_weights(
    subject: Subject, engine: EngineDriver, requests: Sequence[Request], version: int, weights: int = 0
) -> None:
    """Fault an engine that tells another version, or generates with something else than these weights."""
    told = engine.stats().weight_version
    if told != version:
        fault(f"stats().weight_version is {told} where version {version} is loaded; what was loaded stays loaded")
    results = flat(engine.generate(requests))
    subject.expect_versions(results, {version})
    subject.expect_logprobs(results, weights=weights)


def _expect_update_in_flight(
    subject: Subject,
    requests: Sequence[Request],
    *,
    cache: CachePolicy,
    loads: Mapping[int, int],
    units: int,
    **changes: int,
) -> None:
    """Fault updates that lose something in flight, make it again, or mistake which weights made a unit.

    `loads` are the weights of each version: the first is loaded in a pause after so many `units`, others while the
    engine generates.
    """
    needs(subject.capabilities.in_flight_update, "in_flight_update")
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
        tensors = subject.pricer.tensors(weights)
        _expect_digest(engine.load(version, tensors, cache), tensors, "under requests in flight")
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


def _expect_quantised(subject: Subject, model: Model, form: Format) -> None:
    """Fault matrices that are not held, attested and computed with as what codes and scales stand for."""
    matrices, engine = model.facts().matrices, subject.start(quantization=form.name)
    rounded = attrs.evolve(subject, pricer=Pricer(model, seed=1, form=form))
    first, second = (quantise_tensors(form, subject.pricer.tensors(weights), matrices) for weights in (0, 1))
    expected, found = ShardMap.of_tensors(first).tensors, ShardMap.of_layout(engine.layout()).tensors
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            fault(
                f"with quantization {form.name}, the layout gives {name!r} as {found.get(name)}; it is published as "
                f"{expected.get(name)}: see `Format.tensors` and `ModelFacts.matrices`"
            )
    requests = [subject.request(index, index, num_samples=2) for index in range(3)]
    _expect_weights(rounded, engine, requests, 0)
    _expect_digest(engine.load(1, second), second, f"of codes, scales and other tensors, with quantization {form.name}")
    _expect_weights(rounded, engine, requests, 1, weights=1)
