"""Checkpoints of diffusers: read into shards, refused where they are damaged, and written for its own loaders."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from cosmos_core.config.schema import MeshConfig, PolicyConfig
from cosmos_core.errors import CheckpointError, ConfigError, DataError, PluginIncompatibleError
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import ModelContext
from cosmos_core.testing.layouts import PluginModel
from cosmos_core.testing.worlds import run_world
from cosmos_core.types import Prompt
from cosmos_core.weights.shards import canonical_tensors
from cosmos_model_wan import tiny

CPU = torch.device("cpu")
SIZE = {"height": 16, "width": 16, "num_frames": 5, "text": "encoder", "text_length": 512}


@pytest.fixture
def folder(checkpoint):
    return checkpoint(tiny.pipeline())


@pytest.fixture
def weights(folder):
    return f"{folder}/transformer/diffusion_pytorch_model.safetensors"


def built(make, folder, **options):
    return make(path=folder, **SIZE, **options).build(seed=0, dtype=torch.float32, device=CPU)


def test_a_checkpoint_is_read_as_it_is_stored(make, folder, weights):
    module, stored = built(make, folder), WanTransformer3DModel.from_pretrained(f"{folder}/transformer")
    found = canonical_tensors(module)
    assert found.keys() == load_file(weights).keys()
    for name, tensor in stored.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    # No checkpoint has these, and a module made on meta has no values for them.
    for name, buffer in stored.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), buffer, rtol=0, atol=0)


def test_rotary_angles_stay_exact_in_bfloat16(make, folder):
    module = make(path=folder, **SIZE).build(seed=0, dtype=torch.bfloat16, device=CPU)
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
    assert {each.dtype for each in module.buffers()} == {torch.float32}


def test_files_of_several_shards_are_read(make, folder, tmp_path):
    WanTransformer3DModel.from_pretrained(f"{folder}/transformer").save_pretrained(
        tmp_path / "parts" / "transformer", max_shard_size="20KB"
    )
    assert (tmp_path / "parts" / "transformer" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    whole, parts = built(make, folder), make(path=str(tmp_path / "parts"), height=16, width=16)
    # Without an autoencoder the latents are pixels, of which this one has another number of channels.
    with pytest.raises(ConfigError, match="generates 4 channels, and pixels have 3"):
        parts.shape  # noqa: B018
    for name, tensor in parts.build(seed=0, dtype=torch.float32, device=CPU).state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])


def exported_in_a_world(maker, folder, directory):
    model = maker()
    policy = PolicyConfig(precision="fp32", mesh=MeshConfig(dp_shard=2))
    layout = layout_of(policy, form_mesh(policy.mesh, "cpu"), "cpu")
    module = model.build(seed=0, dtype=torch.float32, device=CPU, layout=layout)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    model.export(module, directory)
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.nightly
def test_an_export_from_shards_is_a_pipeline(make, folder, tmp_path):
    maker = PluginModel(
        plugin="wan",
        options={**tiny.OPTIONS, **SIZE},
        context=ModelContext(path=folder, config=None, assets=tmp_path / "assets"),
    )
    buffers, _ = run_world(2, exported_in_a_world, maker, folder, tmp_path / "exported")
    pipeline = WanPipeline.from_pretrained(tmp_path / "exported")
    before = built(make, folder)
    for name, tensor in pipeline.transformer.state_dict().items():
        assert torch.equal(tensor, 1.5 * before.state_dict()[name]), name
    for name, buffer in buffers.items():
        assert torch.equal(buffer, before.get_buffer(name)), name
    again = make(path=str(tmp_path / "exported"), **SIZE)
    payload = again.encode(Prompt(text="a red"))
    assert again.latent_spec(payload).shape == (4, 2, 2, 2)


def test_an_export_of_a_config_alone_is_a_transformer(model, module, tmp_path):
    model.export(module, tmp_path / "exported")
    index = json.loads((tmp_path / "exported" / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    found = WanTransformer3DModel.from_pretrained(tmp_path / "exported" / "transformer").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in canonical_tensors(module).items())
    # What diffusers keeps in float32 stays so.
    assert model.export(module, tmp_path / "halved", dtype=torch.bfloat16) == [torch.bfloat16, torch.float32]
    halved = WanTransformer3DModel.from_pretrained(tmp_path / "halved" / "transformer", torch_dtype=torch.bfloat16)
    assert {each.dtype for each in halved.parameters()} == {torch.bfloat16, torch.float32}
    for name, tensor in halved.state_dict().items():
        assert torch.equal(tensor, found[name].to(tensor.dtype)), name


def change(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_damaged_checkpoint_is_refused(make, folder, weights, subtests):
    whole = Path(weights).read_bytes()
    for edit, said in [
        (lambda tensors: tensors.pop("proj_out.bias"), "lacks 1 of the .* the first is proj_out.bias"),
        (lambda tensors: tensors.update(stray=torch.zeros(2)), "holds stray, which WanTransformer3DModel has no use"),
        (lambda tensors: tensors.update({"proj_out.bias": torch.zeros(3)}), "has shape .3,., and .* needs .16,."),
        (lambda tensors: tensors["proj_out.bias"].fill_(torch.nan), "16 of the 16 values read of proj_out.bias"),
    ]:
        with subtests.test(edit=edit, said=said):
            Path(weights).write_bytes(whole)
            change(weights, edit)
            with pytest.raises(CheckpointError, match=said):
                built(make, folder)


def test_a_truncated_checkpoint_is_refused(make, folder, weights):
    with Path(weights).open("r+b") as file:
        file.truncate(4000)
    with pytest.raises(CheckpointError, match="truncated"):
        make(path=folder, **SIZE).facts()


def test_a_checkpoint_without_weights_can_be_planned(make, folder, weights):
    Path(weights).unlink()
    facts = make(path=folder, **SIZE).facts()
    assert "diffusion_pytorch_model.safetensors" in facts.absent_weights
    assert facts.num_parameters > 20_000


def test_a_config_that_makes_no_model_is_refused(make, subtests):
    for change, said in [
        ({"num_layer": 3}, "model.config.num_layer: WanTransformer3DModel has no such option; did you mean num_layers"),
        ({"_class_name": "Other"}, "of a Other, and this plugin is for WanTransformer3DModel"),
        ({"attention_head_dim": "x"}, "model.config"),
    ]:
        with subtests.test(change=change, said=said), pytest.raises(ConfigError, match=said):
            make(config={**tiny.CONFIG, **change}).facts()


def test_options_that_do_not_fit_are_refused(make, subtests):
    for options, said in [
        ({"height": 9}, "height: 9 is no multiple of 2"),
        ({"text": "encoder"}, "no text encoder"),
    ]:
        with subtests.test(options=options, said=said):
            model = make(**options)
            with pytest.raises((ConfigError, DataError), match=said):
                model.latent_spec(model.encode(Prompt(text="red")))


def test_frames_of_the_autoencoder_are_told(make, folder):
    with pytest.raises(ConfigError, match="num_frames: 4 makes 4 patches, and the transformer has places for 2"):
        make(config=tiny.CONFIG | {"rope_max_seq_len": 2}).facts()
    with pytest.raises(ConfigError, match=r"num_frames: 6 is not 1 \+ a multiple of 4"):
        make(path=folder, **{**SIZE, "num_frames": 6}).facts()


def test_a_buffer_that_nobody_computes_is_told(model, folder, make, monkeypatch):
    whole = make(path=folder, **SIZE)
    monkeypatch.setattr(type(whole), "computed", lambda self, config: {})
    with pytest.raises(PluginIncompatibleError, match=r"the buffer rope\.freqs_cos is in no checkpoint"):
        whole.build(seed=0, dtype=torch.float32, device=CPU)


def test_an_image_model_needs_an_image(make, checkpoint, tmp_path):
    model = make(path=checkpoint(tiny.pipeline(in_channels=12)), **SIZE)
    with pytest.raises(DataError, match="needs an image"):
        model.encode(Prompt(text="a red"))


def test_media_for_a_text_model_are_refused(model):
    with pytest.raises(DataError, match="takes no images"):
        model.encode(Prompt(text="red", media=("x.png",)))


def test_the_config_that_is_written_names_its_class(model, module, tmp_path):
    model.export(module, tmp_path)
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel"


def test_of_a_checkpoint_on_the_hub_planning_fetches_no_weights(make, folder, tmp_path, monkeypatch):
    asked = []

    def fetch(name, *, revision, allow_patterns, ignore_patterns):
        asked.append((name, revision))
        for path in Path(folder).rglob("*"):
            place = path.relative_to(folder)
            if path.is_file() and any(place.match(pattern) for pattern in allow_patterns):
                (tmp_path / "hub" / place).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "hub" / place).write_bytes(path.read_bytes())
        return str(tmp_path / "hub")

    monkeypatch.setattr("cosmos_core.models.weights.streaming.snapshot_download", fetch)
    monkeypatch.setattr("cosmos_core.models.weights.loading.get_hf_file_metadata", lambda url: None)
    model = make(path="some/name", revision="tag", **SIZE)
    assert model.facts().num_parameters > 20_000
    assert not list((tmp_path / "hub").rglob("*.safetensors"))
    model.build(seed=0, dtype=torch.float32, device=CPU)
    assert [each.parent.name for each in (tmp_path / "hub").rglob("*.safetensors")] == ["transformer"]
    model.encode(Prompt(text="a red"))
    assert {each.parent.name for each in (tmp_path / "hub").rglob("*.safetensors")} == {"transformer", "text_encoder"}
    assert set(asked) == {("some/name", "tag")}


def test_a_path_that_is_no_folder_is_told(make):
    with pytest.raises(ConfigError, match="no folder"):
        make(path="./nowhere", **SIZE).facts()


def test_weights_in_pickles_are_refused(make, checkpoint, subtests):
    for part in ["vae", "text_encoder"]:
        with subtests.test(part=part):
            folder = checkpoint(tiny.pipeline())
            row = Prompt(text="a red", demonstration=f"{folder}/film.npy")
            np.save(row.demonstration, np.zeros((5, 16, 16, 3), np.uint8))
            (kept,) = Path(folder, part).glob("*.safetensors")
            stem = "diffusion_pytorch_model" if part == "vae" else "pytorch_model"
            torch.save(load_file(kept), kept.with_name(f"{stem}.bin"))
            kept.unlink()
            with pytest.raises(CheckpointError, match=f"no usable safetensors of .* at .*/{part}"):
                make(path=folder, **SIZE).encode_demonstration(row)


def film(model):
    return model.codec.encode(torch.zeros(3, 5, 16, 16))


def caption(model):
    return model.encode(Prompt(text="a red"))


def image(model):
    return model.encode_image(torch.zeros(3, 16, 16))


def parts(encoded):
    """A checkpoint that has what encodes it."""
    tower = {"in_channels": 12, "image_dim": tiny.IMAGE_WIDTH, "added_kv_proj_dim": 24} if encoded is image else {}
    return tiny.pipeline(**tower)


def test_rows_are_encoded_where_the_module_is(make, checkpoint, subtests):
    for encoded in [film, caption, image]:
        with subtests.test(encoded=encoded):
            model = make(path=checkpoint(parts(encoded)), **SIZE)
            encoded(model)
            # What is computed there cannot be brought back.
            model.device = torch.device("meta")
            with pytest.raises(RuntimeError, match="meta tensor"):
                encoded(model)


def test_planning_is_told_what_processes_hold_besides(make, folder):
    guidance, encoders, autoencoder = "guidance's second forward", "encoders of captions and images", "autoencoder"
    assert make(path=folder, **SIZE).facts().uncounted == (guidance, encoders, autoencoder)
    assert make(path=folder, encoders="cpu", **SIZE).facts().uncounted == (guidance, autoencoder)
    assert make(path=folder, **(SIZE | {"text": "table"})).facts().uncounted == (guidance, autoencoder)
    assert make().facts().uncounted == (guidance,)


def test_encoders_leave_the_device_to_the_weights_where_the_recipe_says_so(make, checkpoint, subtests):
    for encoded in [caption, image]:
        with subtests.test(encoded=encoded):
            model = make(path=checkpoint(parts(encoded)), encoders="cpu", **SIZE)
            model.device = torch.device("meta")
            encoded(model)


def test_encoders_compute_as_the_recipe_says(make, checkpoint, subtests):
    for precision, dtype in [(None, torch.float32), ("bf16", torch.bfloat16)]:
        with subtests.test(precision=precision, dtype=dtype):
            path = checkpoint(parts(image))
            model = make(path=path, encoder_precision=precision, **SIZE)
            for encoded in (model.encode_words("a red"), image(model)):
                assert encoded.dtype == torch.float32
                assert torch.equal(encoded.to(dtype).float(), encoded)
            for encoder in (model._encoder, model._looker):
                with encoder._part.used() as (module, _):
                    assert {each.dtype for each in module.parameters()} == {dtype}


def test_the_negative_prompt_is_encoded_on_the_cpu_whatever_encodes_rows(make, folder):
    model = make(path=folder, negative_prompt="a blue", **SIZE)
    model.device = torch.device("meta")
    assert model.negative_text().isfinite().all()
    with pytest.raises(RuntimeError, match="meta tensor"):
        caption(model)


def test_threads_share_the_autoencoder(make, folder):
    codec = make(path=folder, **SIZE).codec
    pixels, latents = torch.rand(3, 9, 16, 16), torch.rand(4, 3, 2, 2)
    expected = codec.encode(pixels), codec.decode(latents)
    with ThreadPoolExecutor(2) as pool:
        works = [pool.submit(codec.encode, pixels) if i % 2 else pool.submit(codec.decode, latents) for i in range(16)]
        found = [work.result() for work in works]
    assert all(torch.equal(each, expected[0 if i % 2 else 1]) for i, each in enumerate(found))
