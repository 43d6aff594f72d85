"""The engine `diffusion`: denoises with any model that is a `Denoising`, and records what is trained on."""
