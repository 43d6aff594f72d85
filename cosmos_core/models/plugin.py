"""The model plugin `hf`: any Hugging Face causal language model, or vision-language model."""

from __future__ import annotations

from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

from cosmos_core.errors import ConfigError
from cosmos_core.models.huggingface import MIXTURE_CAPABILITIES, HuggingFaceModel
from cosmos_core.models.vision.generic import GenericOptions, GenericVisionModel
from cosmos_core.models.weights.loading import LIBRARY_ERRORS, require_folder
from cosmos_core.protocols import Model, ModelContext, Provider, hookimpl


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the generic model."""
    return Provider(
        create=create,
        options=GenericOptions,
        # Axes that a model cannot use are refused by its facts.
        capabilities=MIXTURE_CAPABILITIES,
    )


def create(options: GenericOptions, context: ModelContext) -> HuggingFaceModel:
    """The model of a recipe: one that sees, if its config has a tower beside the text."""
    if _sees(context):
        return GenericVisionModel(options, context)
    if options.image_options:
        raise ConfigError(
            f"model.options.image_options: {', '.join(options.image_options)} would be of no use: the model's config "
            "is of one that sees no images, or cannot be read; remove them, or check model.path and model.config"
        )
    return HuggingFaceModel(options, context)


def _sees(context: ModelContext) -> bool:
    """Tell whether the config is of a vision-language model; where it cannot be read, the model says why when asked."""
    if context.path is not None:
        require_folder(context.path)
        try:
            config_class = type(AutoConfig.from_pretrained(context.path, trust_remote_code=context.trust_remote_code))
        except LIBRARY_ERRORS:
            return False
    elif (model_type := (context.config or {}).get("model_type")) in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
    else:
        return False
    return config_class in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and len(config_class.sub_configs) > 1
