"""`model.keep_packed`: keep a packed model in a file.

The file is reused while the checkpoint and the code stay the same.
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from conf.errors import UserError
from kernels import build
from models.formats.packed_file import NotUsable, is_packed, read_packed, restore, save_packed
from models.sharding import ParallelLayout
from pipelines.jobs.output_folder import kept_folder
from pipelines.loading.fingerprint import code_digest, file_fingerprint, sha256_of
from pipelines.loading.model_plan import ModelPlan

# settings of `quant` that do not change the packed weights
UNPACKED = {"block_activations", "kv_cache", "probe", "probe_kl"}

log = logging.getLogger(__name__)


def load_packed(plan: ModelPlan, read: Callable[[], None]) -> None:
    """Map the planned model's weights from the kept file. If it is not usable, `read` the weights and write the file.

    A file of other files, settings or code is replaced. Several processes may do this at once. Raises UserError as
    `restore` does, if the file cannot be written, and if the device is not a CPU.
    """
    if plan.device.type != "cpu":
        unused = f"model.keep_packed=true is not used by device={plan.device.type}"
        raise UserError(f"{unused}: leave it out, or give device=cpu")
    path, identity = _place(plan), _identity(plan)
    try:
        restore(plan.model, path, read_packed(path, identity), plan.dtype)
    except NotUsable as error:
        read()
        try:
            with _only_writer(path.parent):
                if not is_packed(path, identity):  # another process may have written it meanwhile
                    save_packed(plan.model, path, identity)
        except OSError as failed:
            reason = f"{path} cannot be written ({failed.strerror or failed})"
            raise UserError(f"model.keep_packed=true, but {reason}: make room for it, or leave it out") from failed
        log.warning("model.keep_packed: %s %s; it is made now, %.0f MB", path, error, path.stat().st_size / 1e6)


def _place(plan: ModelPlan) -> Path:
    """Return the path of the file: one per model, head, quantisation and dtype.

    A newer checkpoint or newer code replaces it.
    """
    local = Path(plan.options.path).expanduser()
    model = local.resolve() if local.exists() else Path(plan.options.path)  # or a hub id
    quant = {name: value for name, value in asdict(plan.quant).items() if name not in UNPACKED}
    quant |= {"activations": plan.quant.activations.in_files}
    head = plan.source.architecture.head.name
    identity = {"model": model, "head": head, "quant": quant, "kernels": build.library() is not None}
    if plan.model.config.capabilities.predicts_ahead:
        identity["predicts_ahead"] = True
    if plan.parallel_layout != ParallelLayout():
        identity["division"] = plan.parallel_layout
    names = model.name, plan.quant.scheme.name, str(plan.dtype).removeprefix("torch."), _digest(identity)[:12]
    return kept_folder("packed") / f"{'-'.join(names)}.safetensors"


def _identity(plan: ModelPlan) -> str:
    """Return the digest of the checkpoint's files, of the importance matrix, and of the code that reads, quantises and
    packs them.
    """
    files = file_fingerprint(plan.source.checkpoint.path, "model")
    if plan.quant.imatrix is not None:
        files |= {"imatrix": sha256_of(Path(plan.quant.imatrix).expanduser())}
    return _digest({"files": files, "code": code_digest("*.py"), "torch": torch.__version__})


def _digest(parts: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
