"""More architectures and layouts than the unit tests of models have."""

import pytest
import torch

from tests.unit.models.attention.test_context import CASES, check_slices
from tests.unit.models.parallel.test_parallelize import (
    BOTH,
    FSDP,
    TIED,
    TP,
    WHOLE_SEQUENCE,
    check,
    check_kept_whole,
    check_uneven_vocabulary,
    outcomes,
)
from tests.unit.models.test_building import check_loaded, check_memory
from tests.unit.models.test_small import check_large
from tests.unit.models.weights.test_exporting import check_export, check_failing_conversion


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "changes"),
    [
        ("llama", FSDP, {}, {}),
        ("llama", TP, WHOLE_SEQUENCE, TIED),
        ("qwen3", TP, {}, {}),
        ("qwen3", TP, WHOLE_SEQUENCE, {"attention_bias": True}),
        ("qwen3", BOTH, {}, TIED),
        ("opt", TP, {}, {}),
        ("qwen3_moe", TP, {}, {}),
        ("qwen3_moe", {"dp_shard": 2, "ep": 2}, {}, {}),
        ("deepseek_v3", TP, {}, {}),
        ("deepseek_v3", {**BOTH, "ep": 2}, {"recompute": "full"}, {}),
    ],
)
def test_gradients_of_two_micro_batches_are_those_of_one_process(kind, sizes, options, changes):
    check(outcomes(kind, sizes, options, changes))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen3", WHOLE_SEQUENCE), ("apertus", {}), ("apertus", WHOLE_SEQUENCE), ("deepseek_v3", {})],
)
def test_a_block_that_a_plugin_keeps_whole_is_whole_with_all_that_is_in_it(kind, options):
    check_kept_whole(kind, options)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", TIED), ("qwen3", {}), ("opt", {}), ("opt", TIED), ("deepseek_v3", {}), ("deepseek_v3", TIED)],
)
def test_a_vocabulary_that_tp_does_not_divide_is_split_unevenly(kind, changes):
    check_uneven_vocabulary(kind, changes)


@pytest.mark.parametrize(
    ("size", "case"), [(size, case) for size in CASES if size > 2 for case in CASES[size]], ids=str
)
def test_slices_of_a_row_give_what_the_row_gives(size, case):
    check_slices(size, case)


@pytest.mark.parametrize(
    ("family", "is_tied", "sizes"),
    [
        ("qwen3", False, {"dp_shard": 2}),
        ("qwen3_moe", True, {"pp": 2, "dp_shard": 2, "ep": 2}),
        ("deepseek_v3", False, {"dp_shard": 2, "tp": 2}),
        ("deepseek_v3", True, {"dp_shard": 2}),
    ],
)
def test_an_export_is_that_of_one_process(tmp_path, family, is_tied, sizes):
    check_export(tmp_path, family, is_tied, sizes, torch.float32)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"pp": 2}, "model.embed_tokens.weight"),
        ({"tp": 2, "dp_shard": 2}, "model.embed_tokens.weight"),
        ({"tp": 2, "dp_shard": 2}, "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_failing_conversion_ends_the_export_on_every_process(tmp_path, sizes, name):
    check_failing_conversion(tmp_path, sizes, name)


@pytest.mark.parametrize(
    ("family", "sizes", "is_tied"),
    [
        ("qwen3", {"dp_shard": 2, "tp": 2}, True),
        ("qwen3", {"pp": 2}, False),
        ("llama", {"dp_shard": 2}, False),
        ("qwen3_moe", {"dp_shard": 2, "ep": 2}, False),
    ],
)
def test_a_part_is_loaded_with_what_the_whole_has(tmp_path, family, sizes, is_tied):
    check_loaded(tmp_path, family, sizes, is_tied)


def test_loading_takes_the_memory_of_the_share(tmp_path):
    check_memory(tmp_path, {"dp_shard": 4})


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_a_large_model_is_checked_on_a_small_one_with_every_kind_of_layer(tmp_path, model_type):
    check_large(tmp_path, model_type)
