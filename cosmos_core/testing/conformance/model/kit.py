"""The kit for models, language and world alike: payloads go in, log-probabilities of decisions come out."""

from __future__ import annotations

from cosmos_core.testing.conformance.model.decisions import ModelComparing, ModelDecisions
from cosmos_core.testing.conformance.model.encoding import ModelConversing, ModelEncoding, ModelShowing
from cosmos_core.testing.conformance.model.gradients import ModelGradients, ModelWeights
from cosmos_core.testing.conformance.model.latents import ModelBlending, ModelConditioning
from cosmos_core.testing.conformance.model.layouts import ModelLayouts
from cosmos_core.testing.conformance.model.noise import ModelDenoising, ModelNoising
from cosmos_core.testing.conformance.model.packing import ModelPacking, ModelPadding
from cosmos_core.testing.conformance.model.recording import ModelCounters, ModelDeclarations, ModelRecording
from cosmos_core.testing.conformance.model.subject import ModelBuilding


class ModelConformance(
    ModelBuilding,
    ModelEncoding,
    ModelPacking,
    ModelPadding,
    ModelDecisions,
    ModelComparing,
    ModelDenoising,
    ModelNoising,
    ModelBlending,
    ModelGradients,
    ModelWeights,
    ModelCounters,
    ModelRecording,
    ModelConditioning,
    ModelShowing,
    ModelConversing,
    ModelLayouts,
    ModelDeclarations,
):
    """What every model must satisfy, on a tiny one of its family.

    A language model needs `plugin` and `config` (or `path`):

        class TestLlama(ModelConformance):
            plugin = "llama"
            config = TINY

    A model of another kind of payload overrides `payloads`, `reference` and `load_exported` as well.

    Attributes:
        config: A Hugging Face config, as `[model.config]` of a recipe, for random weights. Take a few layers of width
            16 to 64 and a large `initializer_range` (0.2), so that mistakes show.
        path: A folder with a small checkpoint, instead of `config`.
        tokenizer: What `prepare` is asked to make, as `[model.tokenizer]` of a recipe; None asks for nothing.
        temperatures: At which log-probs and entropies are compared with the reference. Gradients are tested at the
            first that is not 1.
        tolerance: Largest difference of a log-prob or entropy in float32: absolute, and relative to its size.

    Fixtures to override:
        options: The plugin's options, as a recipe gives them.
        context: The `ModelContext`.
        prompts: Rows, of different lengths, with demonstrations.
        corpus: Texts that the tokenizer is trained on; those of `prompts`.
        payloads: What is packed and evaluated; the demonstrations of `prompts`, noised where the model is `Noising`. At
            least two, of different lengths, and one at least of each payload kind that is declared.

    Methods to override:
        reference(model, module, payloads, *, temperature): What each payload's decisions are, by other means; one
            `Decided` a payload, its entropy None where there is none to compare. The default exports the module,
            loads it with `transformers.AutoModelForCausalLM` in float32 and runs each sequence alone.
        load_exported(directory): The tensors of an exported folder by canonical name, as the family's public library
            reads them. The default is `AutoModelForCausalLM.from_pretrained`.
    """
