"""Embeddings beside clips: safetensors, and pickles that are made of nothing but arrays."""

import itertools
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from cosmos_core.data import BadRowError
from cosmos_core.errors import DataError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_dataset_world.clips.cache import LocalCache
from cosmos_dataset_world.clips.embeddings import usable_embedding
from cosmos_dataset_world.clips.pickles import NotAnArrayError, read_array

torch.set_num_threads(1)

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def usable(tmp_path):
    cache = LocalCache(tmp_path / "copies", 1 << 20)
    return lambda path, width=4: usable_embedding(path, width, cache)


def tensor_of(path):
    with safe_open(path, "pt") as file:
        (name,) = file.keys()
        return file.get_tensor(name)


def test_a_file_is_used_as_it_is(usable, tmp_path):
    save_file({"t5": VALUES}, tmp_path / "a.safetensors")
    assert usable(tmp_path / "a.safetensors") == tmp_path / "a.safetensors"


def test_a_leading_one_is_dropped(usable, tmp_path, subtests):
    for dtype in [torch.float32, torch.bfloat16]:
        with subtests.test(dtype=dtype):
            values = torch.tensor(VALUES).to(dtype)
            path = tmp_path / f"{dtype}.safetensors"
            save_tensors({"t5": values[None]}, path)
            assert torch.equal(tensor_of(usable(path)), values)


def test_a_file_that_changes_is_converted_again(usable, tmp_path):
    for values in (VALUES, 2 * VALUES[:2]):
        save_file({"t5": values[None]}, tmp_path / "a.safetensors")
        assert np.array_equal(tensor_of(usable(tmp_path / "a.safetensors")).numpy(), values)


def test_another_shape_is_refused(usable, tmp_path, subtests):
    for arrays, message in [
        ({"a": VALUES[:, :3].copy()}, "width 3, and embedding_width is 4"),
        ({"a": VALUES[0]}, r"shape \(4,\); give \[tokens, width\]"),
        ({"a": VALUES[:0]}, r"shape \(0, 4\)"),
        ({"a": VALUES.astype(np.int64)}, "values of type I64, not floats"),
        ({"a": VALUES, "b": VALUES}, "2 tensors, where one is wanted"),
    ]:
        with subtests.test(arrays=arrays, message=message):
            save_file(arrays, tmp_path / "a.safetensors")
            with pytest.raises(BadRowError, match=message):
                usable(tmp_path / "a.safetensors")


def test_a_damaged_file_is_refused(usable, tmp_path, subtests):
    for content in [b"", b"\xff" * 40, b"\x08" + bytes(7) + b"{}      ", "cut"]:
        with subtests.test(content=content):
            path = tmp_path / "a.safetensors"
            save_file({"a": VALUES}, path)
            path.write_bytes(path.read_bytes()[:-4] if content == "cut" else content)
            with pytest.raises(BadRowError, match=r"a\.safetensors is no usable safetensors file"):
                usable(path)


def test_a_header_of_anything_else_is_refused(usable, tmp_path, subtests):
    for header in [
        b"[" * 200_000,
        b'{"a": {"dtype": "F32", "shape": [Infinity, 1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1, 1, 2], "data_offsets": [0.0, 8.0]}}',
        b'{"a": {"dtype": "F32", "shape": [1, 1, 2], "data_offsets": [-8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}',
    ]:
        with subtests.test(header=header):
            path = tmp_path / "a.safetensors"
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
            with pytest.raises(BadRowError, match=r"a\.safetensors is no usable safetensors file"):
                usable(path)


TENSOR = torch.tensor(VALUES)
WRITTEN = {
    "array": (VALUES, VALUES),
    "list": ([VALUES], VALUES),
    "dict": ({"embedding": VALUES}, VALUES),
    "three levels": ([{"embedding": (VALUES,)}], VALUES),
    "led": ([VALUES[None]], VALUES),
    "fortran": (np.asfortranarray(VALUES), VALUES),
    "big-endian": (VALUES.astype(">f4"), VALUES),
    "half": (VALUES.astype(np.float16), VALUES),
    "tensor": (TENSOR, VALUES),
    "bfloat16": ([TENSOR.bfloat16()], VALUES),
    "transposed": (TENSOR.t().contiguous().t(), VALUES),
    "slice": (torch.cat([TENSOR, TENSOR])[3:], VALUES),
}


def test_a_pickle_of_an_array_becomes_a_file(usable, tmp_path, subtests):
    for protocol, kind in itertools.product(range(pickle.HIGHEST_PROTOCOL + 1), WRITTEN):
        with subtests.test(protocol=protocol, kind=kind):
            written, expected = WRITTEN[kind]
            path = tmp_path / f"{kind}-{protocol}.pickle"
            path.write_bytes(pickle.dumps(written, protocol=protocol))
            assert np.array_equal(tensor_of(usable(path)).numpy(), expected)


class Calls:
    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


STATE = b"\x80\x04cnumpy\nndarray\n}\x8c\x01aK\x01sb."
FUNCTION = b"\x80\x04c_codecs\nencode\nN}\x8c\x0c__defaults__)s\x86b."


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_pickle_of_anything_else_is_refused_and_runs_nothing(tmp_path, monkeypatch, subtests):
    for content, message in [
        (Calls(os.system, "touch ran"), r"names posix.system, which no array needs; it is not trusted"),
        (Calls(eval, "open('ran', 'w')"), r"names builtins.eval"),
        (Calls(torch.load, "ran"), r"names torch.serialization.load"),
        (
            Calls(torch.storage._load_from_bytes, pickle.dumps(Calls(os.system, "touch ran"))),
            r"[Uu]nsupported|weights_only",
        ),
        (
            Calls(torch._utils._rebuild_tensor_v2, TENSOR.storage, 9, (3, 4), (4, 1), False, {}),
            "names|no pickle|object",
        ),
        (np.array([object], dtype=object), "names builtins.object|values are objects"),
        ([VALUES, VALUES], "holds a list, and one array is wanted"),
        ("text", "holds a str"),
        (STATE, "."),
        (FUNCTION, "sets attributes of a function"),
        (b"no pickle", "."),
        (b"\x80\x02]q\x00h\x00a.", "holds a list"),  # one that holds itself
        (b"\x80\x02}q\x00K\x01h\x00s.", "holds a dict"),
        ([[[[VALUES]]]], "holds a list"),
        (b"\x80\x02Nr\x00\x00\x00\x04.", r"place 67,108,864 of the memo"),
        (b"\x80\x02" + b"N0" * 10_000 + b"N.", "more than 10,000 steps"),
        *(
            (Calls(torch.storage._load_from_bytes, content), ".")
            for content in (b"", b"PK\x03\x04garbage" * 10, b"abcdef" * 20, bytes(1024))
        ),
        (pickle.dumps(VALUES)[:-20], "."),
    ]:
        with subtests.test(content=content, message=message), monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            path = tmp_path / "a.pickle"
            path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
            with pytest.raises(NotAnArrayError, match=message):
                read_array(path)
            assert not (tmp_path / "ran").exists()


def test_rows_name_their_embeddings(tmp_path, clips, cache):
    folder = tmp_path / "clips"
    for number, name in enumerate("abcd"):
        clips.write_clip(folder, name, f"scene {name}", shade=number)
    (folder / "text_embedding").mkdir()
    save_file({"t5": VALUES}, folder / "text_embedding" / "a.safetensors")
    save_file({"t5": VALUES[:, :2].copy()}, folder / "text_embedding" / "b.safetensors")
    (folder / "text_embedding" / "c.pickle").write_bytes(pickle.dumps([VALUES]))
    plugins = PluginSet.load([("dataset", "world-folder")])

    def make(**options):
        given = {"train": "clips", "embedding_width": 4, "on_bad_row": "skip", "embeddings": "required", **options}
        return plugins.create("dataset", "world-folder", given, dataset_context(plugins, 0, tmp_path))

    dataset = make()
    assert dataset.size("train") == 1
    assert dataset.row("train", 0).metadata["text_embedding"] == str(folder / "text_embedding" / "a.safetensors")
    assert {each.reason for each in dataset.omitted("train")} == {
        "an embedding of width 2",
        "an embedding is a pickle",
        "no embedding",
    }
    dataset = make(pickles=True)
    converted = dataset.row("train", 1).metadata["text_embedding"]
    assert converted.startswith(str(cache))
    assert np.array_equal(tensor_of(converted).numpy(), VALUES)
    with pytest.raises(DataError, match=r"b\.safetensors has an embedding of width 2, and embedding_width is 4"):
        make(on_bad_row="refuse", pickles=True, embeddings="optional")
