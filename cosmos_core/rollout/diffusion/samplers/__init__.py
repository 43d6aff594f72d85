"""Samplers: how one denoising step follows another, as tables of numbers; each module is one of them."""
