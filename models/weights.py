"""Load a checkpoint's tensors as a model's parameters.

Names and shapes of all tensors are compared with the model's before any data is read, and one error lists all
differences. The tensors are then streamed, so that peak host memory is about the model plus one tensor.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.formats.base import CodedWeights, WeightFile
from models.heads import NoHead
from models.layers.matrix_layer import MatrixLayer
from models.linear_layers import checkpoint_parts, matrix_layers, other_parameters

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANDOM_STD = 0.02  # the initializer_range of most families
LISTED = 8  # the maximum number of tensors of each kind in an error


def checkpoint_dtype(files: list[WeightFile]) -> torch.dtype:
    """Return the dtype of the checkpoint's first tensor. Raises UserError if the first file has no tensors."""
    if not files[0].dtypes:
        raise UserError(f"{files[0].path} holds no tensors")
    return next(iter(files[0].dtypes.values()))


def stored_dtype(config: ConfigReader, files: list[WeightFile]) -> str:
    """Return the dtype of config.json, else of the first tensor, else float32.

    Raises UserError for an unsupported dtype.
    """
    name = config.raw("torch_dtype") or config.raw("dtype")
    if name is None:
        name = str(checkpoint_dtype(files)).removeprefix("torch.") if files else "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise UserError(f"the checkpoint's dtype {name!r} is not supported: give model.dtype={'|'.join(DTYPES)}")
    return name


def match_tensors(model: CausalLM, files: list[WeightFile], ignored: tuple[str, ...]) -> dict[str, str]:
    """Map the names of the checkpoint tensors that the model needs to the model's names.

    Tensors are not needed if their names end with one of `ignored` or start with one of the model's `ignored_prefixes`,
    or if they belong to a head that the model does not have. Raises UserError with all missing, unexpected, duplicate
    and wrong-shaped tensors, and for quantised tensors of a float layer.
    """
    expected = expected_shapes(model)
    names = full_names(expected)
    # The checkpoint may hold a second copy of a tied head.
    accepted = expected.keys() | {head_name(model)}
    headless = (f"{model.layout.head}.",) if isinstance(model.head, NoHead) else ()
    _compare(expected, accepted, files, names, ignored, model.ignored_prefixes + headless)
    matched = {name: names[name] for file in files for name in file.shapes if name in names}
    parts = checkpoint_parts(model).items()
    floats = other_parameters(model).keys() | {name for name, (layer, _) in parts if layer.method.takes_floats}
    for file in files:
        for name in matched.keys() & file.dtypes.keys():
            dtype = file.dtypes[name]
            if matched[name] in floats and (not dtype.is_floating_point or dtype.itemsize == 1):
                remedy = "expected floats of 16 or 32 bits, or scales next to it"
                raise UserError(f"{file.path}: {name} is {dtype}, but its layer is not quantised: {remedy}")
    return matched


def expected_shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all checkpoint tensors that the model needs, by name.

    These are the parameters, and the tensors that matrix layers load.
    """
    parts = checkpoint_parts(model).items()
    return parameter_shapes(model) | {name: layer.method.tensors()[part] for name, (layer, part) in parts}


def parameter_shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def head_name(model: CausalLM) -> str:
    return f"{model.layout.head}.weight"


def embedding_name(model: CausalLM) -> str:
    return f"{model.layout.embedding}.weight"


def full_names(expected: Collection[str]) -> dict[str, str]:
    """Map each name that a checkpoint may use to the model's name.

    A model that was saved without its head lacks the first part of its names: h.0.weight is transformer.h.0.weight.
    """
    return {name.partition(".")[2]: name for name in expected} | {name: name for name in expected}


def load_weights(
    model: CausalLM,
    files: list[WeightFile],
    ignored: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
    on_bytes: Callable[[int, int], None],
) -> None:
    """Load the checkpoint's tensors into a model on the meta device, cast to `dtype` on `device`.

    Matrix layers get their tensors without a cast. `on_bytes(done, total)` is called after every tensor, with bytes of
    `dtype`. Raises UserError as `match_tensors` does.
    """
    matched = match_tensors(model, files, ignored)
    parameters, parts = other_parameters(model), checkpoint_parts(model)
    total = sum(torch.Size(shape).numel() for shape in expected_shapes(model).values()) * dtype.itemsize
    done, damaged = 0, []
    incomplete: dict[MatrixLayer, dict[str, Tensor]] = {}
    for file in files:
        for found_name, tensor in file.read(name for name in file.shapes if name in matched):
            name = matched[found_name]
            if tensor.is_floating_point() and _holds_nan(tensor):
                damaged.append(name)
            if name in parts:
                layer, part = parts[name]
                tensors = incomplete.setdefault(layer, {})
                tensors[part] = tensor
                if tensors.keys() == layer.method.tensors().keys():
                    _load(layer, name.rpartition(".")[0], incomplete.pop(layer), dtype, device)
            if name in parameters:
                assign(model, name, tensor.to(device, parameter_dtype(model, name, dtype), copy=file.is_mapped))
            done += tensor.numel() * dtype.itemsize
            on_bytes(done, total)
    if damaged:
        log.warning("%d tensors hold NaN: %s", len(damaged), _listed(damaged))


def _load(layer: MatrixLayer, name: str, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
    try:
        layer.load(tensors, dtype, device)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _holds_nan(tensor: Tensor) -> bool:
    if tensor.dtype.itemsize == 1:  # float8, for which torch has no reductions
        tensor = tensor.float()
    # amax returns NaN if any value is NaN; no other check reads memory as fast
    return bool(tensor.numel() and tensor.amax().isnan())


def refuse_damaged(model: CausalLM) -> None:
    """Raise UserError with the names of the loaded parameters that hold NaN or infinite values."""
    damaged = [name for name, parameter in model.named_parameters() if not _is_finite(parameter)]
    if damaged:
        raise UserError(
            f"the weights hold NaN or infinite numbers: {_listed(damaged)}: the files are damaged, or the numbers exceed the range "
            "of model.dtype=float16: download the files again, or try model.dtype=float32"
        )


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.sum(dtype=torch.float32).isfinite() or tensor.isfinite().all())  # the sum allocates no memory


class CastFile:
    """A weight file that casts parameters to another dtype.

    Other tensors, and parameters that always stay float32, keep their dtype.
    """

    def __init__(self, file: WeightFile, model: CausalLM, matched: dict[str, str], dtype: torch.dtype) -> None:
        self._file = file
        self.path, self.shapes, self.is_mapped = file.path, file.shapes, file.is_mapped
        cast = {name for name in file.shapes if name in matched and not name.endswith(model.float32_tensors)}
        self.dtypes = file.dtypes | dict.fromkeys(cast, dtype)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._file.read(names):
            yield name, tensor.to(self.dtypes[name])


def parameter_dtype(model: CausalLM, name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(model.float32_tensors) else dtype


def module_bytes(model: CausalLM, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of each module's own parameters after loading, by module name. The model is on the meta device."""
    sizes = {name: layer.method.num_bytes(dtype) for name, layer in matrix_layers(model).items()}
    for name, parameter in other_parameters(model).items():
        module = name.rpartition(".")[0]
        size = parameter.numel() * parameter_dtype(model, name, dtype).itemsize
        sizes[module] = sizes.get(module, 0) + size
    return sizes


def _compare(
    expected: dict[str, tuple[int, ...]],
    accepted: set[str],
    files: list[WeightFile],
    names: dict[str, str],
    ignored: tuple[str, ...],
    ignored_prefixes: tuple[str, ...],
) -> None:
    stored: dict[str, tuple[int, ...]] = {}
    duplicates = []
    for file in files:
        for name, shape in file.shapes.items():
            full_name = names.get(name, name)
            duplicates += [name] if full_name in stored else []
            stored[full_name] = shape
    faults = {
        "missing": [name for name in expected if name not in stored],
        "unexpected": [
            name
            for name in stored
            if name not in accepted and not name.endswith(ignored) and not name.startswith(ignored_prefixes)
        ],
        "found twice": duplicates,
        "wrong shape": [
            f"{n} {list(stored[n])}, expected {list(s)}" for n, s in expected.items() if n in stored and stored[n] != s
        ],
    }
    if texts := [f"{sort}: {_listed(names)}" for sort, names in faults.items() if names]:
        problem = f"does not hold the model that its config describes: {'; '.join(texts)}"
        if isinstance(files[0], CodedWeights):  # of GGUF, whose file has the config too
            raise UserError(f"{files[0].path} {problem}: convert the model again")
        raise UserError(f"{files[0].path.parent} {problem}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))


def place_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the parameter `name` of a float model to `tensor`, also if a matrix layer's method holds it."""
    module, _, leaf = name.rpartition(".")
    layer = model.get_submodule(module)
    if isinstance(layer, MatrixLayer) and leaf in layer.held:
        layer.load({leaf: tensor}, tensor.dtype, tensor.device)
    else:
        assign(model, name, tensor)


def initialise_randomly(model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
    """Set norms to 1, biases to 0, and other parameters to normal values of standard deviation 0.02.

    The values are the same in every run on one kind of device. Raises UserError if a layer does not take floats.
    """
    generator = torch.Generator(device).manual_seed(0)

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            return tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        return tensor.normal_(0, RANDOM_STD, generator=generator)

    parameters, parts = other_parameters(model), checkpoint_parts(model)
    for name, shape in expected_shapes(model).items():
        tensor = make(name, shape, parameter_dtype(model, name, dtype))
        if name in parameters:
            assign(model, name, tensor)
        if name in parts:
            _load(parts[name][0], name, {parts[name][1]: tensor}, dtype, device)
