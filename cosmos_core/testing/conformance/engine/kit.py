"""The kit for engines."""

from __future__ import annotations

from cosmos_core.testing.conformance.engine.crowd import CrowdTests
from cosmos_core.testing.conformance.engine.draws import DrawTests
from cosmos_core.testing.conformance.engine.flight import FlightTests
from cosmos_core.testing.conformance.engine.foreseeing import ForeseeingTests
from cosmos_core.testing.conformance.engine.generation import GenerationTests
from cosmos_core.testing.conformance.engine.quantising import QuantisingTests
from cosmos_core.testing.conformance.engine.recording import RecordingTests
from cosmos_core.testing.conformance.engine.updates import UpdateTests


class EngineConformance(
    GenerationTests, DrawTests, FlightTests, UpdateTests, CrowdTests, QuantisingTests, RecordingTests, ForeseeingTests
):
    """What every engine must satisfy: inherit it and set `plugin`.

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
