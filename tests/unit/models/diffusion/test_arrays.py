"""What conditions is on the device once, for as long as it is used."""

import gc

import torch

from cosmos_core.models.diffusion.arrays import Resident, payload_of, side_by_side

CPU = torch.device("cpu")


def prompts(number):
    return [payload_of({"text": torch.full((2, 4), float(index))}) for index in range(number)]


def resident(most):
    asked = []

    def conditioning(payload):
        asked.append(payload.arrays["text"].data[:4])
        return {"text": torch.full((2, 4), float(len(asked))), "is_given": torch.ones(3, dtype=torch.bool)}

    return Resident(conditioning, most), asked


def test_each_prompt_is_placed_once_in_the_dtype_of_the_transformer():
    kept, asked = resident(2)
    first, second = prompts(2)
    for _ in range(3):
        found = kept.of([first, second, first], CPU, torch.bfloat16)
    assert len(asked) == 2
    assert found["text"][:, 0, 0].tolist() == [1.0, 2.0, 1.0]
    assert (found["text"].dtype, found["is_given"].dtype) == (torch.bfloat16, torch.bool)
    kept.of([first], CPU, torch.float32)
    assert (len(asked), len(kept._kept)) == (3, 1)


def test_the_samples_of_a_prompt_share_its_memory():
    kept, _ = resident(2)
    (prompt,) = prompts(1)
    found = kept.of([prompt] * 5, CPU, torch.float32)["text"]
    assert found.shape == (5, 2, 4)
    assert found.untyped_storage().nbytes() == 2 * 4 * 4


def test_those_used_last_stay_and_those_nobody_holds_go():
    kept, asked = resident(2)
    first, second, third = prompts(3)
    for prompt in (first, second, first, third, first):
        kept.of([prompt], CPU, torch.float32)
    assert (len(asked), len(kept._kept)) == (3, 2)
    # More at once than stay are all there.
    assert len(kept.of([first, second, third], CPU, torch.float32)["text"]) == 3
    del first, second, third, prompt
    gc.collect()
    assert not kept._kept


def test_what_is_kept_in_inference_mode_can_be_trained_with():
    kept, _ = resident(2)
    (prompt,) = prompts(1)
    with torch.inference_mode():
        kept.of([prompt], CPU, torch.bfloat16)
    assert not kept.of([prompt], CPU, torch.bfloat16)["text"].is_inference()


def test_what_one_lacks_is_zero_beside_another():
    found = side_by_side([{"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(3)}])
    assert found["b"].tolist() == [[0.0] * 3, [1.0] * 3]
