"""What a request must be to be denoised."""

from __future__ import annotations

from cosmos_core.errors import DataError, EngineError
from cosmos_core.protocols import Canvas, Denoising, Request
from cosmos_core.rollout.diffusion.foresight import sampling_problems
from cosmos_core.rollout.diffusion.options import DiffusionOptions


def check_request(request: Request, options: DiffusionOptions, model: Denoising) -> Canvas:
    """What is to be denoised.

    Raises:
        EngineError: It cannot be; names the request, the value seen and what is allowed.
    """
    where, sampling = f"request {request.request_id!r}", request.sampling
    if request.prompt.kind != "latents":
        raise EngineError(f"{where}: its prompt is of kind {request.prompt.kind!r}; this engine takes 'latents'")
    if sampling.num_samples < 1 or (sampling.temperature == 0 and sampling.num_samples != 1):
        raise EngineError(f"{where}: {sampling.num_samples} samples at temperature {sampling.temperature}")
    for problem in sampling_problems(options, sampling):
        raise EngineError(f"{where}{problem}")
    try:
        canvas = model.canvas(request.prompt)
    except DataError as error:
        raise EngineError(f"{where}: {error}") from error
    if canvas.is_given_T is not None and bool(canvas.is_given_T.all()):
        raise EngineError(f"{where}: all of its {canvas.shape[1]} latent frames are given, none is left to denoise")
    return canvas
