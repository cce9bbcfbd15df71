"""A quantised checkpoint while it is made: one file per part, so that a later run can continue.

Files appear by rename when they are complete. The metadata of a part's file holds its reports. The remaining files of
the checkpoint are written at the end.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader
from models.formats.base import Checkpoint
from models.formats.huggingface_writer import write_companions
from models.formats.manifest import write_manifest
from models.formats.safetensors_writer import save_tensors
from quantization.quantizer import LinearReport, QuantizedLayer
from quantization.smoothing_record import add_folds
from quantization.stored_parts import StoredPart

INDEX = "model.safetensors.index.json"
REST = "model-rest.safetensors"
JOB = "job.json"


class PartFiles:
    """The folder of a model that is being quantised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def begin(cls, folder: Path, job: dict[str, Any]) -> "PartFiles":
        """Keep the contents of the folder if they are of the same `job`, else remove them."""
        try:
            same = json.loads((folder / JOB).read_text(encoding="utf-8")) == job
        except (OSError, ValueError):
            same = False
        if not same:
            for file in folder.iterdir():
                file.unlink()
            (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
        return cls(folder)

    def path_of(self, part: QuantizedLayer) -> Path:
        return self.folder / f"model-{part.index:05}.safetensors"

    def has(self, part: QuantizedLayer) -> bool:
        return (self.path_of(part)).is_file()

    def write(self, part: QuantizedLayer, stored: StoredPart) -> None:
        if stored.folds is not None:
            # Folds come first: a part counts as complete as soon as its file exists.
            add_folds(self.folder, stored.folds)
        reports = json.dumps([asdict(report) for report in stored.reports])
        save_tensors(self.path_of(part), stored.tensors, {"reports": reports})

    def write_rest(self, tensors: dict[str, Tensor]) -> None:
        """Write the tensors that are in no part: embeddings, the final norm, a float head."""
        save_tensors(self.folder / REST, tensors, {})

    def read(self, part: QuantizedLayer) -> StoredPart:
        """Return a stored part. Raises UserError if its file is damaged."""
        path = self.path_of(part)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                return StoredPart(
                    tensors, [LinearReport(**report) for report in json.loads(file.metadata()["reports"])]
                )
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}): remove {self.folder} to begin again") from error

    def complete(self, source: Checkpoint, is_tied: bool, config: dict[str, Any], dtype: torch.dtype) -> None:
        """Write the index, the config, the tokenizer's files and the manifest.

        source: the float checkpoint, whose files are copied. is_tied: whether the head has no tensors of its own.
        config: additional entries of config.json. Raises UserError if a part's file is damaged.
        """
        changed = dict(config)
        if not is_tied:
            changed["tie_word_embeddings"] = False
        reader = ConfigReader(source.config.values | changed, "config.json")
        self._write_index()
        write_companions(replace(source, config=reader), self.folder, dtype)
        (self.folder / JOB).unlink()
        write_manifest(self.folder, {})

    def _write_index(self) -> None:
        weight_map: dict[str, str] = {}
        size = 0
        for path in sorted(self.folder.glob("model-*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    weight_map |= dict.fromkeys(file.keys(), path.name)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is damaged ({error}): remove {self.folder} to begin again") from error
            size += path.stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
