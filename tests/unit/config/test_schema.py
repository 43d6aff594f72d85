"""The recipe's own classes."""

import sys
from importlib.metadata import distribution

import attrs
import pytest

from cosmos_core.config import schema
from cosmos_core.plugins.known import KNOWN
from cosmos_service_tools.reference import keys

TABLES = [each for each in vars(schema).values() if isinstance(each, type) and attrs.has(each)]


def test_no_default_names_a_plugin_of_another_distribution(subtests):
    for table in TABLES:
        with subtests.test(table=table):
            own = {point.name for point in distribution("cosmos-core").entry_points}
            defaults = {key.default.strip('"') for key in keys(table)}
            assert defaults & {name for _, name in KNOWN} <= own


def test_a_warm_up_must_name_its_plugin():
    assert [key.name for key in keys(schema.WarmupConfig) if key.is_required] == [
        "plugin",
        "steps",
        "optimizer.lr",
    ]


def test_the_size_of_samples_is_a_number_of_bytes():
    sizes = {"none": 0, "0GB": 0, "500MB": 500_000_000, "2.5TB": 2_500_000_000_000, "all": sys.maxsize}
    assert {text: schema.SamplesConfig(keep=text).max_bytes for text in sizes} == sizes
    for wrong in ("10", "10 GB", "GB", "-1GB", "1e3MB", "10gb"):
        with pytest.raises(ValueError, match=f'keep is "{wrong}"; give a size'):
            schema.SamplesConfig(keep=wrong)
