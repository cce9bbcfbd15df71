"""Every architecture has a config in tests/bench/family_configs.py, small enough to measure."""

from pathlib import Path

import torch

from models.config import ConfigReader
from models.registry import ARCHITECTURES, CHATGLM2, find_architecture
from tests.bench.family_configs import write_configs


def test_every_architecture_has_one(tmp_path: Path) -> None:
    families = set()
    for folder in write_configs(tmp_path):
        config = ConfigReader.from_folder(folder)
        architecture = find_architecture(config)
        with torch.device("meta"):
            model = architecture.build(architecture.read_config(config))
        assert config.unread() == [], folder.name
        assert 0.3e9 < sum(parameter.numel() for parameter in model.parameters()) < 0.9e9, folder.name
        families.add("chatglm2" if architecture is CHATGLM2 else folder.name)
    assert families == {*ARCHITECTURES, "chatglm2"}
