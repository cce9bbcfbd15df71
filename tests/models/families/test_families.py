"""Every row of the table: the architecture computes the same as its class in transformers, and reads or refuses the
values of config.json."""

from operator import attrgetter
from pathlib import Path

import pytest

from conf.errors import UserError
from models.config import ConfigReader
from models.registry import ARCHITECTURES
from tests.helpers import catalog
from tests.helpers.cases import each
from tests.helpers.family import noted
from tests.helpers.hybrid_families import HYBRID
from tests.helpers.oracle import assert_equals_transformers, random_prompts

ROWS = catalog.ROWS | HYBRID


@each("name", ROWS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    reference = row.write(tmp_path, **row.variants[0])
    assert_equals_transformers(tmp_path, reference, random_prompts(96, row.lengths), row.tolerance)


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_every_variant_equals_transformers(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    for i, variant in enumerate(row.variants[1:]):
        folder = tmp_path / str(i)
        folder.mkdir()
        with noted(variant):
            reference = row.write(folder, **variant)
            assert_equals_transformers(folder, reference, random_prompts(96, row.lengths), row.tolerance)


@each("name", ROWS)
def test_config(name: str) -> None:
    row = ROWS[name]
    read_config = ARCHITECTURES[row.model_type or name].read_config
    for changes, expected in row.read:
        with noted(changes):
            reader = ConfigReader(row.json(changes), "config.json")
            config = read_config(reader)
            assert {key: attrgetter(key)(config) for key in expected} == expected
            assert reader.unread() == []
    for changes, message in row.refused:
        with noted(changes), pytest.raises(UserError, match=message):
            read_config(ConfigReader(row.json(changes), "config.json"))
