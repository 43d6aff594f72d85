"""The kit for engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch

from cosmos_core.protocols import CachePolicy, EngineCapabilities, EngineContext, FinishReason, Generated, Model
from cosmos_core.protocols.model import Record
from cosmos_core.testing.conformance.engine.generation import GenerationTests
from cosmos_core.testing.conformance.engine.requests import CrowdTests, FlightTests
from cosmos_core.testing.conformance.engine.subject import EngineSetting, Pricer, Start, needs_tokens, recorded_of, twin
from cosmos_core.testing.conformance.engine.updates import QuantisingTests, UpdateTests
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

RECORD: Final = Record(name="hidden", dtype="float32", shape=(3,), option="the engine kit")


def recording(model: Model) -> Model:
    """The same model, of which every unit's last hidden state is recorded, in part: it shows whatever was wrong."""
    return twin(model, records=lambda _: (RECORD,), record=lambda _, module: _record(module))


def _record(module: Any) -> Callable[[], Mapping[str, torch.Tensor]]:
    newest: dict[str, torch.Tensor] = {}

    def note(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        hidden_UD = (output[0] if isinstance(output, tuple) else output)[0]
        newest[RECORD.name] = hidden_UD[:, : RECORD.shape[0]].float()

    module.get_decoder().layers[-1].register_forward_hook(note)
    return lambda: newest


class RecordingTests(EngineSetting):
    """Records of units, whatever happened to their sequence."""

    @pytest.fixture
    def recording_model(self, context: EngineContext, capabilities: EngineCapabilities) -> Model:
        """A model that records, for engines that do."""
        needs_tokens(capabilities)
        if not capabilities.records:
            pytest.skip("not declared: records")
        return recording(context.model)

    @pytest.fixture
    def updates_in_flight(self, capabilities: EngineCapabilities) -> None:
        """Skip engines that take no weights while requests are in flight."""
        if not capabilities.in_flight_update:
            pytest.skip("not declared: in_flight_update")

    def test_every_unit_that_was_computed_has_its_record(
        self, start: Start, recording_model: Model, pricer: Pricer, prompts: list[Payload]
    ) -> None:
        """Prompts in parts, shared by samples, single units, slots that close up: each unit keeps its own."""
        requests = [
            self.request(index, prompt, seed=index, max_units=1 + 4 * index, num_samples=3)
            for index, prompt in enumerate(prompts)
        ]
        for results in start(model=recording_model).generate(requests):
            for generated in results:
                self._check_records(generated, pricer)

    def test_partial_results_have_the_records_of_their_units(
        self, start: Start, recording_model: Model, pricer: Pricer, prompts: list[Payload]
    ) -> None:
        """An aborted completion is as much worth as a finished one of its length."""
        engine = start(model=recording_model, max_in_flight=2)
        handles = engine.submit(
            [self.request(index, prompts[index], seed=index, max_units=self.long_units) for index in range(4)]
        )
        engine.wait_for_units(10)
        engine.pause("abort")
        ended = [generated for handle in handles for generated in engine.results(handle)]
        assert all(generated.reason is FinishReason.ABORTED for generated in ended)
        for generated in ended:
            if generated.num_units:
                self._check_records(generated, pricer)

    @pytest.mark.usefixtures("updates_in_flight")
    @pytest.mark.parametrize("cache", ["keep", "recompute"])
    def test_records_are_of_the_forward_whose_cache_is_in_use(
        self,
        start: Start,
        recording_model: Model,
        pricer: Pricer,
        prompts: list[Payload],
        cache: CachePolicy,
    ) -> None:
        """Kept over an update, old units keep their records; computed anew, they are recorded anew."""
        engine = start(model=recording_model)
        handles = engine.submit(
            [self.request(index, prompts[index], seed=index, max_units=self.long_units) for index in range(3)]
        )
        engine.pause_in_flight(handles, 20)
        engine.load(1, pricer.tensors(1), cache)
        engine.resume()
        for generated in (generated for handle in handles for generated in engine.results(handle)):
            if cache == "recompute":
                self._check_records(generated, pricer, weights=1)
            else:
                old = generated.payload.arrays["prompt"].shape[0] + self.versions(generated).count(0) - 1
                self._check_records(generated, pricer, last=old)

    @pytest.mark.usefixtures("updates_in_flight")
    def test_what_ends_before_it_is_computed_anew_keeps_its_old_records(
        self,
        start: Start,
        recording_model: Model,
        pricer: Pricer,
        prompts: list[Payload],
    ) -> None:
        """No unit of a partial result is without a record."""
        engine = start(model=recording_model)
        handles = engine.submit(
            [self.request(index, prompts[index], seed=index, max_units=self.long_units) for index in range(3)]
        )
        engine.pause_in_flight(handles, 20)
        engine.load(1, pricer.tensors(1), "recompute")
        engine.abort([handle.request.request_id for handle in handles])
        for generated in (generated for handle in handles for generated in engine.results(handle)):
            if generated.num_units:
                self._check_records(generated, pricer)

    def _check_records(
        self, generated: Generated, pricer: Pricer, *, weights: int = 0, last: int | None = None
    ) -> None:
        """Check the records of a completion's first units (all by default) against those of the trainer's forward."""
        units = generated.payload.arrays["prompt"].shape[0] + generated.num_units - 1
        found = recorded_of(generated, RECORD)
        if found.shape != (units, *RECORD.shape):
            fault(
                f"a prompt and completion of {units + 1} units have records {list(found.shape)}; all units but the "
                "last went through a forward and have one"
            )
        expected = pricer.recorded(generated.payload, _record, weights=weights)[RECORD.name]
        apart = (found - expected)[:last].abs().amax(-1)
        scale = 1.0 + float(expected.abs().max())
        if apart.numel() and not apart.max() <= self.tolerance * scale:
            fault(
                f"the record of unit {int(apart.argmax())} of {units} differs by {apart.max():.2g} from that of the "
                "forward which computed what is cached of it; keep records with their units when slots move, prompts "
                "are shared and the cache is computed anew"
            )


class EngineConformance(GenerationTests, FlightTests, UpdateTests, CrowdTests, QuantisingTests, RecordingTests):
    """Tests that every engine must pass: inherit it and set `plugin`.

    The engine generates with a tiny Hugging Face model from random weights on the CPU, and the trainer's own
    evaluation of that model (`Model.decide`) says what is right. Override what does not fit:

    Attributes:
        timeout_s: Longest time that one call or one request may take.
        start_timeout_s: Longest time that `start` may take.
        tolerance: Largest difference of log-probs, in float32.
        tensor_parallel: Processes that share the model's layers; an engine that declares `tp` has a second class,
            with 2, of all of this or, where each start takes many seconds, of those of `UpdateTests` that depend on who
            holds which slice.
        long_units: Units of the requests that are paused, aborted or updated in flight; raise it for an engine that
            is done with them too soon.

    Fixtures to override: `options`; `model` (class scope), the model to generate with; `prompts`, at least five
    payloads for it, of different lengths; `context`, the `EngineContext` (another device, more memory).

    For payloads that are no tokens, override how a `Generated` is read: `logprobs`, `versions`, `content`. What only
    tokens have (stop ids, greedy, top-k and top-p) is skipped then.
    """
