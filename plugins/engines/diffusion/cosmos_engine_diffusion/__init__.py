"""The engine `diffusion`: denoises with any model that is a `WorldModel`, and records what is trained on."""
