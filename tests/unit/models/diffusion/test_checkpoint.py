"""The other parts of a checkpoint go beside an exported transformer without being copied."""

import torch
from torch import nn

from cosmos_core.models.diffusion.checkpoint import export_transformer


def test_weights_of_other_parts_are_linked_also_from_the_cache_of_a_hub(subtests, tmp_path):
    """There, a file is named by its hash, and its name is a link to it."""
    for number, is_cached in enumerate([False, True]):
        with subtests.test(is_cached=is_cached):
            folder = tmp_path / str(number)
            folder.mkdir()
            part = folder / "checkpoint" / "vae"
            part.mkdir(parents=True)
            weights = part / "diffusion_pytorch_model.safetensors"
            stored = folder / "0abc" if is_cached else weights
            stored.write_bytes(b"weights")
            if is_cached:
                weights.symlink_to(stored)
            (part / "config.json").write_text("{}")
            export_transformer(
                *[nn.Linear(1, 1)] * 2,
                {"_class_name": "Linear", "_diffusers_version": "0"},
                folder / "exported",
                folder / "checkpoint",
                dtype=torch.float32,
            )
            exported = folder / "exported" / "vae"
            assert (exported / weights.name).samefile(stored)
            assert not (exported / weights.name).is_symlink()
            assert not (exported / "config.json").samefile(part / "config.json")
