"""Bodies of requests: what is read, and what is wrong with those that are not."""

import contextlib
import io
import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import save as safetensors

from cosmos_core.data.npy import read_npy
from cosmos_core.types import Array, Message
from cosmos_service_reward_service.arrays import as_float32, rows_of
from cosmos_service_reward_service.bodies import read_body
from cosmos_service_reward_service.cosmos_rl import read_foreign

FRAMES = np.arange(2 * 3 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 3, 4, 5, 3)
LATENTS = np.linspace(-3, 3, 2 * 4 * 2 * 3 * 3, dtype=np.float32).reshape(2, 4, 2, 3, 3)


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def described(*fields, number=2):
    return [{"prompt": f"p{index}", **(fields[index] if fields else {"fps": 8})} for index in range(number)]


def body(arrays, **line):
    made = {"version": 1, "kind": "media", "scorers": ["a"], "completions": described(), **line}
    return json.dumps(made).encode() + b"\n" + arrays


def foreign(arrays, **line):
    return json.dumps({"prompts": ["p0", "p1"], "reward_fn": {"a": 1.0}, **line}).encode() + b"\n" + arrays


def values(array):
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def test_videos_as_npy_and_each_of_its_own_shape_as_safetensors():
    read = read_body(body(npy(FRAMES), scorers=["a", "b", "a"]), most=2)
    assert (read.kind, read.scorers) == ("media", ("a", "b"))
    for completion, frames in zip(read.completions, FRAMES, strict=True):
        assert np.array_equal(values(completion.media.arrays["frames"]), frames)
        assert values(completion.media.arrays["fps"]) == 8.0
        assert completion.payload is None
    read = read_body(body(safetensors({"0": FRAMES[0], "1": FRAMES[1, :1, :2]})), most=2)
    assert [each.media.arrays["frames"].shape for each in read.completions] == [(3, 4, 5, 3), (1, 2, 5, 3)]


def test_images_are_one_frame_and_need_no_rate():
    read = read_body(body(npy(FRAMES[:, 0]), completions=described({}, {})), most=2)
    assert [each.media.arrays["frames"].shape for each in read.completions] == [(1, 4, 5, 3)] * 2
    assert np.array_equal(values(read.completions[1].media.arrays["frames"])[0], FRAMES[1, 0])


def test_latents_are_float32_whatever_they_came_as(subtests):
    for dtype in ["float32", "float16"]:
        with subtests.test(dtype=dtype):
            read = read_body(body(npy(LATENTS.astype(dtype)), kind="latents"), most=2)
            for completion, latents in zip(read.completions, LATENTS.astype(dtype), strict=True):
                assert completion.payload.kind == "latents"
                assert np.array_equal(values(completion.payload.arrays["sample"]), latents.astype("float32"))
                assert completion.payload.arrays["sample"].dtype == "float32"


def test_bfloat16_is_the_upper_half_of_float32():
    exact = np.array([1.0, -2.5, 0.0, 3.0e38], np.float32)
    upper = (exact.view(np.uint32) >> 16).astype(np.uint16)
    read = as_float32(Array(dtype="bfloat16", shape=(4,), data=upper.tobytes()))
    assert np.allclose(values(read), exact, rtol=2**-7)
    assert values(read)[:3].tolist() == [1.0, -2.5, 0.0]


def test_everything_that_is_said_of_a_completion_arrives():
    fields = {"prompt": [{"role": "user", "content": "?"}], "reference": [1, None], "metadata": {"a": {"b": 1}}}
    read = read_body(body(npy(FRAMES[:1]), completions=[{**fields, "fps": 24.0}]), most=1)
    prompt = read.completions[0].prompt
    assert prompt.text == (Message(role="user", content="?"),)
    assert (prompt.reference, prompt.metadata) == ([1, None], {"a": {"b": 1}})


def test_arrays_in_the_order_of_fortran_and_in_the_second_format_are_read():
    assert np.array_equal(values(read_npy(npy(np.asfortranarray(FRAMES)))), FRAMES)
    file = io.BytesIO()
    np.lib.format.write_array(file, FRAMES, version=(2, 0))
    assert np.array_equal(values(read_npy(file.getvalue())), FRAMES)


def test_rows_are_in_place():
    whole = read_npy(npy(FRAMES))
    assert np.shares_memory(np.frombuffer(whole.data, np.uint8), np.frombuffer(rows_of(whole, 2)[1].data, np.uint8))


HUGE = npy(FRAMES[:1]).replace(b"(1, 3, 4, 5, 3)", b"(10**12, 3, 4,)")
LARGE = npy(FRAMES[:1]).replace(b"(1, 3, 4, 5, 3)", b"(9, 9999999999)")


def test_what_cannot_be_read_is_named(subtests):
    for data, message in [
        (b"", "the body has no line of JSON: no newline within 0 bytes"),
        (b"{" * 100_000 + b"\n", "the first line of the body is no JSON"),
        (b"\xff\xfe\n", "the first line of the body is no JSON"),
        (b"[1]\n", "expected a table, got"),
        (body(npy(FRAMES), version=2), "version"),
        (body(npy(FRAMES), kind="video"), 'kind: expected one of "media", "latents"'),
        (body(npy(FRAMES), scorers=[]), "scorers"),
        (body(npy(FRAMES), scorer=["a"]), "scorer: unknown option; did you mean scorers?"),
        (body(npy(FRAMES), completions=described(number=3)), "completions: 3, and a request may have 2"),
        (body(npy(FRAMES), completions=described(number=1)), "an array of 2 rows for 1 completions"),
        (body(npy(FRAMES), completions=[{"fps": 1.0}, {"prompt": 7}]), "completions.0.prompt: required"),
        (body(npy(FRAMES), completions=described({}, {})), "completions.0: fps: required for a video"),
        (body(npy(FRAMES), completions=described({"fps": 0}, {"fps": 1})), "completions.0.fps"),
        (body(b'{"fps": NaN}'), "no safetensors file"),
        (body(npy(FRAMES).replace(b"NUMPY", b"NUMPU")), "no safetensors file"),
        (body(b""), "no safetensors file"),
        (body(npy(FRAMES)[:-1]), "with 359 bytes instead of 360"),
        (body(npy(FRAMES) + b"x"), "with 361 bytes instead of 360"),
        (body(HUGE), "no npy file"),
        (body(LARGE), "with 180 bytes instead of 89999999991"),
        (body(npy(FRAMES.astype(">f4"))), "an npy file of dtype >f4"),
        (body(npy(FRAMES.astype("f8"))), "an npy file of dtype <f8"),
        (body(npy(np.array([{"a": 1}], object), allow_pickle=True)), "an npy file of dtype |O"),
        (body(npy(np.uint8(3))), "an array without dims"),
        (body(npy(FRAMES.astype("f4"))), "completions.0: the array is float32 (3, 4, 5, 3); frames are uint8"),
        (body(npy(FRAMES[..., :2])), "completions.0: the array is uint8 (3, 4, 5, 2); frames are uint8"),
        (body(npy(FRAMES[:, :0])), "an array of shape (2, 0, 4, 5, 3) has no values"),
        (body(npy(FRAMES), kind="latents"), "completions.0: the array is uint8 (3, 4, 5, 3); latents are"),
        (body(safetensors({"0": FRAMES[0]})), "arrays 0; one for each completion is named 0, 1"),
        (body(safetensors({"0": FRAMES[0], "x": FRAMES[0]})), "arrays 0, x; one for each"),
        (body(safetensors({"0": FRAMES[0], "1": FRAMES[0].astype("f8")})), "array '1' has dtype F64"),
        (body(safetensors({"0": FRAMES[0], "1": FRAMES[1]})[:-1]), "no safetensors file"),
    ]:
        with subtests.test(data=data, message=message):
            with pytest.raises(ValueError, match=r".") as found:
                read_body(data, most=2)
            assert message in str(found.value)


def test_an_array_without_values_makes_no_rows(subtests):
    """However many it claims: memory for them is never asked for."""
    for media_type, shape in itertools.product([None, "image", "video", "latent"], [(10**12, 0), (10**12, 3, 0, 5, 5)]):
        with subtests.test(media_type=media_type, shape=shape):
            header = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode()
            empty = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
            read, data = (
                (read_body, body(empty))
                if media_type is None
                else (read_foreign, foreign(empty, media_type=media_type))
            )
            with pytest.raises(ValueError, match="has no values"):
                read(data, most=2)


def test_a_rate_beyond_float32_is_refused_by_name():
    with pytest.raises(ValueError, match=r"completions.1: fps: 1e\+300 is more than a float32 holds"):
        read_body(body(npy(FRAMES), completions=described({"fps": 1}, {"fps": 1e300})), most=2)
    channels_first = np.ascontiguousarray(FRAMES.transpose(0, 4, 1, 2, 3))
    for fps, message in (
        (1e300, "more than a float32 holds"),
        (10**400, r"video_infos.0.video_fps: expected a number"),
    ):
        with pytest.raises(ValueError, match=message):
            read_foreign(foreign(npy(channels_first), media_type="video", video_infos=[{"video_fps": fps}] * 2), most=2)


def test_no_byte_of_a_body_may_do_harm():
    """Whatever is flipped or cut, a body is read or refused, and refused by a ValueError."""
    draw = np.random.default_rng(0)
    images = foreign(npy(FRAMES[:, 0]), media_type="image")
    whole = [body(npy(FRAMES)), body(safetensors({"0": FRAMES[0], "1": FRAMES[1]})), images]
    read = 0
    for number in range(1500):
        data = bytearray(whole[number % 3])
        for _ in range(draw.integers(1, 4)):
            data[draw.integers(0, min(len(data), 300))] = draw.integers(0, 256)
        if number % 5 == 0:
            del data[draw.integers(0, len(data)) :]
        with contextlib.suppress(ValueError):
            (read_foreign if number % 3 == 2 else read_body)(bytes(data), most=2)
            read += 1
    assert 0 < read < 1500


def test_images_videos_and_latents_of_cosmos_rl():
    images = read_foreign(foreign(npy(FRAMES[:, 0]), media_type="image", reward_fn={"a": 1, "b": 0.0}), most=2)
    assert images.scorers == ("a",)
    assert np.array_equal(values(images.completions[1].media.arrays["frames"])[0], FRAMES[1, 0])
    assert images.about == {"shape": [2, 4, 5, 3], "dtype": "torch.uint8", "min": "0.000", "max": "239.000"}

    channels_first = np.ascontiguousarray(FRAMES.transpose(0, 4, 1, 2, 3))
    infos = [{"video_fps": 24.0, "video_path": "x" * 1000}, {}]
    videos = read_foreign(foreign(npy(channels_first), media_type="video", video_infos=infos), most=2)
    assert np.array_equal(values(videos.completions[1].media.arrays["frames"]), FRAMES[1])
    assert [float(values(each.media.arrays["fps"])) for each in videos.completions] == [24.0, 16.0]
    # It is kept with the results: only what the videos were scored with.
    assert videos.about["video_infos"] == [{"video_fps": 24.0}, {"video_fps": 16.0}]

    for media_type in ("latent", "video"):
        latents = read_foreign(foreign(npy(LATENTS.astype("f2")), media_type=media_type), most=2)
        assert np.array_equal(values(latents.completions[0].payload.arrays["sample"]), LATENTS[0].astype("f2"))
    as_bytes = (LATENTS.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    for named in ({}, {"media_type": "latent"}):
        latents = read_foreign(foreign(npy(as_bytes), **named), most=2)
        assert np.allclose(values(latents.completions[1].payload.arrays["sample"]), LATENTS[1], rtol=2**-7, atol=1e-6)
        assert (latents.about["dtype"], latents.about["max"]) == ("torch.bfloat16", "3.000")
    noted = read_foreign(foreign(npy(LATENTS), media_type="latent", video_infos=[{"video_fps": 8.0}, {}]), most=2)
    assert "video_infos" not in noted.about
    # For scorers that decode them.
    assert [float(values(each.payload.arrays["fps"])) for each in noted.completions] == [8.0, 16.0]


def test_other_keys_of_cosmos_rl_are_metadata():
    read = read_foreign(foreign(npy(FRAMES[:, 0]), media_type="image", geneval_tags=["counting"]), most=2)
    assert read.completions[0].prompt.metadata == {"geneval_tags": ["counting"]}


def test_what_cannot_be_read_of_cosmos_rl_is_named(subtests):
    for data, message in [
        (b'"x"\n', "the first line of the body is no JSON object: 'x'"),
        (foreign(npy(FRAMES[:, 0]), media_type="audio"), "media_type"),
        (foreign(npy(FRAMES[:, 0]), media_type="image", prompts=["p"]), "an array of 2 rows for 1 completions"),
        (
            foreign(npy(FRAMES[:, 0]), media_type="image", reward_fn={"a": 0}),
            "reward_fn: no scorer with a weight above",
        ),
        (foreign(npy(FRAMES[:, 0].astype("f2")), media_type="image"), "frames are uint8"),
        (foreign(b"PK\x03\x04", media_type="latent"), "a file of torch.save, which is a pickle; send it as npy"),
        (foreign(b"?", media_type="latent"), "the array is no npy file"),
        (foreign(npy(FRAMES[:, :2]), media_type="video"), "videos are uint8 [videos, 3, frames, height, width]"),
        (
            foreign(npy(FRAMES.transpose(0, 4, 1, 2, 3)), media_type="video", video_infos=[{}]),
            "video_infos: 1 for 2 videos",
        ),
        (foreign(npy(LATENTS), media_type="latent", video_infos=[{}] * 9), "video_infos: 9 for 2 videos"),
        (
            foreign(npy(FRAMES.transpose(0, 4, 1, 2, 3)), media_type="video", video_infos=[{"video_fps": "fast"}, {}]),
            "video_infos.0.video_fps: expected a number above 0, got 'fast'",
        ),
    ]:
        with subtests.test(data=data, message=message):
            with pytest.raises(ValueError, match=r".") as found:
                read_foreign(data, most=2)
            assert message in str(found.value)
