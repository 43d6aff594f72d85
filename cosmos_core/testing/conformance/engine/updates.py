"""New weights: what an engine holds, how an update is loaded whole or not at all, and what is in flight meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import CachePolicy, EngineCapabilities, Generated, Model, TensorSlice
from cosmos_core.protocols.quantization import FORMATS, Format
from cosmos_core.testing.conformance.engine.subject import EngineDriver, EngineSetting, Pricer, Start, refuses
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload
from cosmos_core.weights import slices
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.quantization import quantise_tensors
from cosmos_core.weights.shards import ShardMap, TensorFacts, dtype_name, torch_dtype


class UpdateTests(EngineSetting):
    """Tests of updates of weights."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
    def test_the_layout_covers_each_tensor_once(self, start: Start, pricer: Pricer, dtype: torch.dtype) -> None:
        """The replica fetches what the layout names: what it lacks would stay old for ever."""
        layout = start(dtype=dtype).layout()
        tensors = pricer.tensors(0)
        held = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in tensors.items()}
        for rank, pieces in layout.items():
            share = {name: torch.zeros_like(count) for name, count in held.items()}
            for piece, name in pieces:
                self._check_piece(piece, name, tensors, dtype)
                share[piece.name][slices.within(piece, _whole(piece.name, tensors))] += 1
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

    def test_an_update_is_loaded_and_attested(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Nothing is served on a version whose digest is not the published one."""
        engine = start()
        # The same requests before and after: what was kept of their prompts is old then.
        requests = [self.request(index, prompts[index], num_samples=2) for index in range(3)]
        engine.generate(requests)
        tensors = {name: tensor.clone() for name, tensor in pricer.tensors(1).items()}
        digest = engine.load(5, tensors)
        if digest != digest_of(tensors):
            fault(f"commit_update() gave the digest {digest!r}, not that of what was written, {digest_of(tensors)!r}")
        if engine.stats().weight_version != 5:
            fault(f"stats().weight_version is {engine.stats().weight_version} after version 5 was committed")
        for tensor in tensors.values():
            tensor.zero_()
        # What was written belongs to the caller again: the engine must have copied it.
        for results in engine.generate(requests):
            for generated in results:
                self._check_versions(generated, {5})
                self.check_logprobs(pricer, generated, capabilities, weights=1)

    def test_scores_are_those_of_the_loaded_weights(self, start: Start, pricer: Pricer, prompts: list[Payload]) -> None:
        """`score` prices under what is loaded, whatever the engine was started with."""
        engine = start()
        payloads = [each.payload for (each,) in engine.generate([self.request(n, prompts[n]) for n in range(2)])]
        self.check_scores(pricer, engine, payloads, temperature=self.temperature)
        engine.load(1, pricer.tensors(1))
        self.check_scores(pricer, engine, payloads, temperature=self.temperature, weights=1)

    def test_weights_are_loaded_in_the_precision_of_the_recipe(
        self, start: Start, pricer: Pricer, prompts: list[Payload]
    ) -> None:
        """Publishers cast to it before they compute the digest."""
        engine = start(dtype=torch.bfloat16)
        digest = engine.load(1, pricer.tensors(1))
        if digest != digest_of({name: tensor.to(torch.bfloat16) for name, tensor in pricer.tensors(1).items()}):
            fault("with dtype bfloat16, the digest of loaded weights is not that of the bfloat16 ones written")
        ((generated,),) = engine.generate([self.request("one", prompts[0])])
        if not self.logprobs(generated).isfinite().all():
            fault(f"with dtype bfloat16, log-probs are {self.logprobs(generated).tolist()}")

    def test_slices_may_be_smaller_than_those_of_the_layout(self, start: Start, pricer: Pricer) -> None:
        """Large tensors travel in parts, and in any order."""
        engine, tensors = start(), pricer.tensors(1)
        engine.begin_update(1)
        for rank, piece, dtype in reversed(_parts(engine)):
            data = tensors[piece.name][slices.within(piece, _whole(piece.name, tensors))]
            engine.write(rank, piece, data.to(torch_dtype(dtype)))
        if engine.commit_update() != digest_of(tensors):
            fault("an update that was written in halves was not loaded as it was written")

    @pytest.mark.parametrize("cache", ["keep", "recompute"])
    def test_an_update_in_flight_loses_and_restarts_nothing(
        self,
        start: Start,
        pricer: Pricer,
        prompts: list[Payload],
        capabilities: EngineCapabilities,
        cache: CachePolicy,
    ) -> None:
        """Generation goes on over updates; each unit tells which weights made it."""
        if not capabilities.in_flight_update:
            pytest.skip("not declared: in_flight_update")
        engine = start()
        # More samples than slots: some start after the updates, with nothing of the old weights.
        requests = [
            self.request(index, prompts[index], seed=index, max_units=self.long_units, num_samples=2)
            for index in range(3)
        ]
        handles = engine.submit(requests)
        before = engine.pause_in_flight(handles, 40)
        engine.load(3, pricer.tensors(3), cache)
        engine.resume()
        engine.wait_for_units(before + 40)
        engine.load(4, pricer.tensors(4), cache)
        results = [generated for handle in handles for generated in engine.results(handle)]
        for generated in results:
            wanted = self.decisions(self.long_units)
            if generated.num_units != wanted:
                fault(f"a request in flight over an update ended with {generated.num_units} of {wanted} units")
            self._check_versions(generated, {0, 3, 4})
        old = sum(self.versions(generated).count(0) for generated in results)
        if old != before:
            fault(
                f"{before} units were generated before the first update, but {old} carry the old version; a unit "
                "carries the version of the weights that made it, and what was generated is never made again"
            )
        for generated in results:
            self._check_by_version(generated, pricer, capabilities, cache)

    def test_the_same_weights_under_a_kept_cache_change_nothing(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """A kept cache gives no evaluation of the trainer under other weights; under the same ones it does."""
        if not capabilities.in_flight_update:
            pytest.skip("not declared: in_flight_update")
        engine = start()
        handles = engine.submit(
            [self.request(index, prompts[index], seed=index, max_units=self.long_units) for index in range(3)]
        )
        engine.pause_in_flight(handles, 20)
        engine.load(1, pricer.tensors(0), "keep")
        engine.resume()
        for generated in (generated for handle in handles for generated in engine.results(handle)):
            self._check_versions(generated, {0, 1})
            self.check_logprobs(pricer, generated, capabilities)

    def test_a_sample_that_starts_after_an_update_uses_nothing_older(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Whatever is shared with the samples that started before: they go on with the old prompt, it must not."""
        if not capabilities.in_flight_update:
            pytest.skip("not declared: in_flight_update")
        engine = start(max_in_flight=2)
        # The first request makes room for the group's second sample while the first one is still going on.
        first = self.request("first", prompts[0], max_units=self.long_units // 2)
        group = self.request("group", prompts[1], max_units=self.long_units, num_samples=3)
        handles = engine.submit([first, group])
        engine.pause_in_flight(handles, 10)
        engine.load(1, pricer.tensors(1), "keep")
        engine.resume()
        fresh = [generated for generated in engine.results(handles[1]) if generated.oldest_version == 1]
        if not fresh:
            fault("of 4 samples in 2 slots, none started after an update that came early; do they all carry version 0?")
        for generated in fresh:
            self.check_logprobs(pricer, generated, capabilities, weights=1)

    def test_an_incomplete_update_is_refused_and_nothing_changes(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Half-loaded weights would generate something that no trainer can price."""
        engine = start()
        engine.begin_update(2)
        engine.write_all(pricer.tensors(1), skip=1)
        refuses(WeightSyncError, engine.commit_update, "an update that lacks one slice")
        self._check_unchanged(engine, pricer, prompts, capabilities, "after a refused update")
        engine.abort_update()
        self._check_unchanged(engine, pricer, prompts, capabilities, "after abort_update()")
        if engine.load(2, pricer.tensors(1)) != digest_of(pricer.tensors(1)):
            fault(
                "a whole update after an aborted one gives another digest; abort_update() must forget what was written"
            )

    def test_a_slice_written_twice_stands_for_no_other(self, start: Start, pricer: Pricer) -> None:
        """Counting bytes is not enough: a retry sends a slice again."""
        engine, tensors = start(), pricer.tensors(1)
        parts = _parts(engine)
        size = {piece: piece.shape for _, piece, _ in parts}
        twice = next(
            (index for index in range(1, len(parts)) if size[parts[index][1]] == size[parts[index - 1][1]]), None
        )
        if twice is None:
            pytest.skip("no two slices of one shape")
        engine.begin_update(1)
        for index, (rank, piece, dtype) in enumerate(parts):
            again = parts[index - 1][1] if index == twice else piece
            data = tensors[again.name][slices.within(again, _whole(again.name, tensors))]
            engine.write(rank, again, data.to(torch_dtype(dtype)))
        refuses(WeightSyncError, engine.commit_update, "an update with one slice twice and another missing")

    def test_updates_follow_their_order(self, start: Start, pricer: Pricer) -> None:
        """A late or repeated call must not load what nobody published."""
        engine = start()
        refuses(WeightSyncError, engine.commit_update, "commit_update() without begin_update()")
        engine.begin_update(2)
        refuses(WeightSyncError, lambda: engine.begin_update(3), "begin_update() while an update is open")
        layout = engine.layout()
        piece, _ = next(iter(layout.values()))[0]
        refuses(
            WeightSyncError,
            lambda: engine.write(max(layout) + 1, piece, torch.zeros(piece.shape)),
            "write() for a rank that the layout does not have",
        )
        engine.abort_update()
        engine.abort_update()
        engine.load(2, pricer.tensors(1))
        engine.load(2, pricer.tensors(2))

    def test_an_older_version_may_be_loaded(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """A run that is taken back to a checkpoint publishes versions again, with other weights."""
        engine = start()
        engine.load(6, pricer.tensors(1))
        engine.load(5, pricer.tensors(2))
        ((generated,),) = engine.generate([self.request("one", prompts[0])])
        self._check_versions(generated, {5})
        self.check_logprobs(pricer, generated, capabilities, weights=2)

    # -- what is common to these tests --------------------------------------------------------------------------------

    @staticmethod
    def _check_piece(piece: TensorSlice, dtype: str, tensors: dict[str, torch.Tensor], wanted: torch.dtype) -> None:
        tensor = tensors.get(piece.name)
        if tensor is None:
            fault(
                f"the layout lists {piece.name!r}, which is no canonical tensor of the model, such as {min(tensors)!r}"
            )
        if not slices.contains(_whole(piece.name, tensors), piece):
            fault(f"the slice {piece} does not lie in a tensor of shape {tuple(tensor.shape)}")
        if tensor.is_floating_point() and dtype.removeprefix("torch.") != dtype_name(wanted):
            fault(f"the layout gives {piece.name!r} as {dtype}, the recipe's precision is {dtype_name(wanted)}")

    def _check_versions(self, generated: Generated, allowed: set[int]) -> None:
        versions = self.versions(generated)
        if len(versions) != generated.num_units or versions != sorted(versions) or not set(versions) <= allowed:
            fault(f"versions of a completion's units are {versions}; only {sorted(allowed)} were loaded, in that order")
        ends = (generated.oldest_version, generated.newest_version)
        if ends != (min(versions), max(versions)):
            fault(f"oldest and newest version are {ends}, those of the units {(min(versions), max(versions))}")

    def _check_by_version(
        self, generated: Generated, pricer: Pricer, capabilities: EngineCapabilities, cache: CachePolicy
    ) -> None:
        """Units of each version have its log-probs; with a kept cache, if there is any, only those of the first do."""
        versions = self.versions(generated)
        if not self.logprobs(generated).isfinite().all():
            fault(f"after an update with cache={cache!r}, log-probs are {self.logprobs(generated).tolist()}")
        for version in {versions[0]} if cache == "keep" and self.has_cache else set(versions):
            places = [place for place, made in enumerate(versions) if made == version]
            self.check_logprobs(pricer, generated, capabilities, weights=version, places=places)

    def _check_unchanged(
        self,
        engine: EngineDriver,
        pricer: Pricer,
        prompts: list[Payload],
        capabilities: EngineCapabilities,
        when: str,
    ) -> None:
        if engine.stats().weight_version != 0:
            fault(f"stats().weight_version is {engine.stats().weight_version} {when}; what was loaded stays loaded")
        ((generated,),) = engine.generate([self.request(when, prompts[0])])
        self._check_versions(generated, {0})
        self.check_logprobs(pricer, generated, capabilities)


def _whole(name: str, tensors: dict[str, torch.Tensor]) -> TensorSlice:
    return slices.whole(name, tuple(tensors[name].shape))


def _parts(engine: EngineDriver) -> list[tuple[int, TensorSlice, str]]:
    """(rank, slice, dtype) of the layout, each slice in two halves."""
    return [
        (rank, part, dtype)
        for rank, held in engine.layout().items()
        for piece, dtype in held
        for part in slices.chunks(piece, max(1, slices.size(piece) // 2))
    ]


@attrs.frozen(kw_only=True, eq=False)
class Quantised:
    """The weights in a format.

    Attributes:
        form: The format.
        whole: Prices with the weights that are quantised.
        rounded: Prices with what codes and scales stand for.
        matrices: Shapes of the model's matrices, by canonical name.
    """

    form: Format
    whole: Pricer
    rounded: Pricer
    matrices: Mapping[str, tuple[int, ...]]

    def published(self, weights: int) -> dict[str, torch.Tensor]:
        """The weights as a policy replica publishes them."""
        return quantise_tensors(self.form, self.whole.tensors(weights), self.matrices)


class QuantisingTests(EngineSetting):
    """Tests of matrices with each of the declared `EngineCapabilities.quantizations`."""

    @pytest.fixture(params=FORMATS)
    @staticmethod
    def quantised(
        request: pytest.FixtureRequest, capabilities: EngineCapabilities, model: Model, pricer: Pricer
    ) -> Quantised:
        """The weights in a declared format."""
        if request.param not in capabilities.quantizations:
            pytest.skip(f"not declared: quantization {request.param}")
        form = FORMATS[request.param]
        rounded = Pricer(model, seed=1, form=form)
        return Quantised(form=form, whole=pricer, rounded=rounded, matrices=model.facts().matrices)

    def test_the_layout_names_codes_and_scales(self, start: Start, quantised: Quantised) -> None:
        """The layout names exactly what is sent: a matrix in full would be sent in vain, and not be attested."""
        form = quantised.form.name
        expected = {
            name: TensorFacts(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
            for name, tensor in quantised.published(0).items()
        }
        found = ShardMap.of_layout(start(quantization=form).layout()).tensors
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                fault(
                    f"with quantization {form}, the layout gives {name!r} as {found.get(name)}; it is published as "
                    f"{expected.get(name)}: see `Format.tensors` and `ModelFacts.matrices`"
                )

    def test_quantised_weights_are_loaded_attested_and_computed_with(
        self, start: Start, quantised: Quantised, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """The trainer can only correct for what it knows: products are those of what codes and scales stand for."""
        engine = start(quantization=quantised.form.name)
        requests = [self.request(index, prompts[index], num_samples=2) for index in range(3)]
        for results in engine.generate(requests):
            for generated in results:
                self.check_logprobs(quantised.rounded, generated, capabilities)
        tensors = quantised.published(1)
        digest = engine.load(1, tensors)
        if digest != digest_of(tensors):
            fault(
                f"with quantization {quantised.form.name}, commit_update() gave the digest {digest!r}, not that of "
                f"the codes, scales and other tensors that were written, {digest_of(tensors)!r}"
            )
        for results in engine.generate(requests):
            for generated in results:
                self.check_logprobs(quantised.rounded, generated, capabilities, weights=1)
