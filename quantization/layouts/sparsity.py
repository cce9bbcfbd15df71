"""The `sparsity_config` of a `quantization_config`, as in the package compressed-tensors up to 0.20."""

from dataclasses import dataclass

from conf.errors import UserError
from models.config import ConfigReader
from models.formats import bitmask

FORMATS = ("dense", *bitmask.FORMATS)


@dataclass(frozen=True)
class StoredSparsity:
    """How the weights of a checkpoint are pruned."""

    structure: str
    """`unstructured`, `2:4` or another pattern."""
    is_alone: bool
    """Whether nothing is quantised."""


def read_sparsity(config: ConfigReader) -> StoredSparsity | None:
    """Return the sparsity in config.json, or None if it has no `sparsity_config`.

    Raises UserError for an unknown format or setting.
    """
    quantization = config.section("quantization_config")
    is_of_package = quantization is not None and quantization.raw("quant_method") == "compressed-tensors"
    sparsity = quantization.section("sparsity_config") if quantization and is_of_package else None
    if quantization is None or sparsity is None:
        return None
    sparsity.expect("format", FORMATS, "dense")
    structure = sparsity.get("sparsity_structure", str, "unstructured")
    for key in ("global_sparsity", "targets", "ignore", "registry_requires_subclass"):
        sparsity.raw(key)  # ignored: the tensors hold the zeros
    if unread := sparsity.unread():
        raise UserError(f"sparsity_config has settings that are not known: {', '.join(unread)}")
    return StoredSparsity(structure, not any(quantization.raw(key) for key in ("config_groups", "kv_cache_scheme")))
