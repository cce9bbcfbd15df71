"""A quantised checkpoint while it is made: a file for each part, so that a later run continues, and at the end the files beside them.

Files appear by rename when they are complete. The parts' reports are in their files' metadata.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.errors import UserError
from models.adapters import Fold
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.formats.base import Checkpoint
from models.formats.huggingface_writer import write_companions
from models.formats.manifest import write_manifest
from models.formats.safetensors_writer import save_tensors
from models.layers.linear import Linear, tied_weight
from models.linear_layers import LinearSpec, linear_layer, linear_specs
from quantization.layouts.base import StoredWeight, WritableLayout
from quantization.linear import CodedMethod
from quantization.plan import place_quantized
from quantization.quantizer import LinearReport, Part
from quantization.scheme import LinearScheme
from quantization.smoothing_record import add_folds

INDEX = "model.safetensors.index.json"
REST = "model-rest.safetensors"
JOB = "job.json"

LayoutOf = Callable[[LinearSpec, LinearScheme, Mapping[str, tuple[int, ...]]], WritableLayout]
"""The layout of a layer's weight in the files. The shapes are of what is there, when it is read."""


class PartFiles:
    """The folder of a model that is being quantised."""

    def __init__(self, folder: Path, layout_of: LayoutOf) -> None:
        self.folder = folder
        self._layout_of = layout_of

    @classmethod
    def begin(cls, folder: Path, job: dict[str, Any], layout_of: LayoutOf) -> "PartFiles":
        """Keep what is in the folder where it is of the same `job`, and remove anything else."""
        try:
            same = json.loads((folder / JOB).read_text(encoding="utf-8")) == job
        except (OSError, ValueError):
            same = False
        if not same:
            for file in folder.iterdir():
                file.unlink()
            (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
        return cls(folder, layout_of)

    def path_of(self, part: Part) -> Path:
        return self.folder / f"model-{part.index:05}.safetensors"

    def has(self, part: Part) -> bool:
        return (self.path_of(part)).is_file()

    def write(
        self,
        part: Part,
        model: CausalLM,
        stored: dict[str, StoredWeight],
        reports: list[LinearReport],
        folds: dict[str, Fold] | None,
    ) -> None:
        """Keep a part that is quantised: codes and scales as they were chosen, the part's other parameters, and what was folded into it.

        `folds`: by the layer's full name; None with a method that folds nothing, or more than scales.
        """
        if folds is not None:
            add_folds(self.folder, folds)  # first: a part that has its file is complete
        tensors = _other_parameters(model, part.prefix)
        for name, scheme in part.schemes.items():
            bias = linear_layer(model, name).bias
            outputs, inputs = stored[name].weight.codes.shape
            spec = LinearSpec(name, (outputs, inputs), is_transposed=False, has_bias=bias is not None)
            own = self._layout_of(spec, scheme, {}).write(stored[name])
            own |= {} if bias is None else {"bias": bias.data}
            tensors |= {f"{name}.{own_name}": tensor for own_name, tensor in own.items()}
        save_tensors(self.path_of(part), tensors, {"reports": json.dumps([asdict(report) for report in reports])})

    def write_rest(self, model: CausalLM, parts: list[Part]) -> None:
        """Write what is in no part: embeddings, the last norm, a head that stays as it is."""
        prefixes = tuple(part.prefix for part in parts)
        tensors = {n: p.data for n, p in model.named_parameters() if not n.startswith(prefixes)}
        save_tensors(self.folder / REST, tensors, {})

    def read(self, part: Part, model: CausalLM) -> list[LinearReport]:
        """Put a part that was kept into the model, which has float layers there. Raises UserError if the file is damaged."""
        path = self.path_of(part)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                reports = [LinearReport(**report) for report in json.loads(file.metadata()["reports"])]
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}): remove {self.folder} to begin anew") from error
        specs = linear_specs(model)
        for name, scheme in part.schemes.items():
            own = {t.removeprefix(f"{name}."): tensors.pop(t) for t in list(tensors) if t.startswith(f"{name}.")}
            if "bias" in own:
                _fill(model, f"{name}.bias", own.pop("bias"))
            layout = self._layout_of(specs[name], scheme, {n: tuple(t.shape) for n, t in own.items()})
            place_quantized(linear_layer(model, name), scheme, layout.read(own))
        for name, tensor in tensors.items():
            _fill(model, name, tensor)
        return reports

    def complete(self, source: Checkpoint, model: CausalLM, config: dict[str, Any], dtype: torch.dtype) -> None:
        """Write what makes a model of the parts: their index, the config, the tokenizer's files and the manifest.

        `source`: the float checkpoint, whose files are copied. `config`: what config.json has besides. Raises UserError if a part's file
        is damaged.
        """
        changed = dict(config)
        if tied_weight(model.head) is None:  # its own, or in codes beside an embedding in floats
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
                raise UserError(f"{path} is damaged ({error}): remove {self.folder} to begin anew") from error
            size += path.stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _other_parameters(model: CausalLM, prefix: str) -> dict[str, Tensor]:
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))
    coded = tuple(f"{name}." for name, layer in linears if isinstance(layer.method, CodedMethod))
    return {
        name: parameter.data
        for name, parameter in model.named_parameters()
        if name.startswith(prefix) and not name.startswith(coded)
    }


def _fill(model: CausalLM, name: str, tensor: Tensor) -> None:
    parameter = model.get_parameter(name)
    parameter.data = tensor.to(parameter.device)
