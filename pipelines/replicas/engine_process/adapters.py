"""Changes of the engine's adapters by frames, and the search for an adapter below the allowed folders."""

import logging
import stat
from collections.abc import Sequence
from pathlib import Path

import torch

from conf.errors import UserError, shortened
from models.formats.lora import CONFIG, WEIGHTS
from pipelines.engine import Engine
from pipelines.engine.kv_cache import free_memory
from pipelines.loading.memory import explained_out_of_memory
from pipelines.replicas.engine_process.frames import AdapterChanged, LoadAdapter, UnloadAdapter

log = logging.getLogger(__name__)

COPIES = 3  # in memory while an adapter is read: its file, its tensors, and its tensors in the model's dtype


class NoAdapter(UserError):
    """The allowed folders do not contain the adapter. The message does not say whether the path exists."""


def change_adapters(engine: Engine, frame: LoadAdapter | UnloadAdapter) -> AdapterChanged:
    """Load or unload an adapter between two steps, and return the answer. An error leaves the engine as it was.

    Raises torch.AcceleratorError, after which the engine cannot continue.
    """
    try:
        if isinstance(frame, UnloadAdapter):
            engine.unload_adapter(frame.name)
            return AdapterChanged(frame.id)
        return AdapterChanged(frame.id, _load(engine, frame))
    except NoAdapter as error:
        return AdapterChanged(frame.id, error=str(error), is_missing=True)
    except (UserError, OSError) as error:
        return AdapterChanged(frame.id, error=str(error))
    except torch.AcceleratorError:
        raise
    except Exception:
        log.exception("adapter %s cannot be loaded", frame.name)
        return AdapterChanged(frame.id, error="the engine failed: the server's log says why")


def _load(engine: Engine, frame: LoadAdapter) -> str:
    """Load an adapter and return its digest."""
    if frame.below is None:
        folder = Path(frame.path).expanduser()
    else:
        folder = find_adapter(frame.path, frame.below)
        _check_size(folder)
    with explained_out_of_memory():
        engine.load_adapter(frame.name, folder, frame.is_pinned)
    digest = engine.adapters.find(frame.name).digest
    if frame.digest not in (None, digest):
        engine.unload_adapter(frame.name)
        raise UserError(f"{frame.path} has changed since it was loaded: load it again")
    return digest


def _check_size(folder: Path) -> None:
    """Raise UserError if too little memory is free to read an adapter. Else the system could end the process."""
    size = sum((folder / name).stat().st_size for name in (CONFIG, WEIGHTS))
    if COPIES * size > (free := free_memory(torch.device("cpu"), 1.0)):
        needed = f"reading its {size} bytes needs {COPIES} times as much memory"
        raise UserError(f"{folder} is too large: {needed}, and {free} bytes are free: give a smaller adapter")


def find_adapter(path: str, below: Sequence[str]) -> Path:
    """Return the folder of an adapter below one of the folders `below`. A relative path begins at one of them.

    Links are followed: the folder and its files must be below the folders. Raises NoAdapter.
    """
    roots = [Path(folder).expanduser().resolve() for folder in below]
    for root in roots:
        try:
            return _adapter(root / path, roots)
        except (OSError, ValueError, RuntimeError):  # missing or outside; a null byte; a loop of links
            continue
    remedy = f"give a folder with {CONFIG} and {WEIGHTS} there, without `..`"
    raise NoAdapter(f"lora_path={shortened(path)} is not an adapter below serve.adapter_folders: {remedy}")


def _adapter(folder: Path, roots: Sequence[Path]) -> Path:
    """Return the resolved folder of an adapter. Raises OSError and ValueError."""
    if ".." in folder.parts:
        raise ValueError
    for file in (folder / name for name in (CONFIG, WEIGHTS)):
        real = file.resolve(strict=True)
        if not stat.S_ISREG(real.stat().st_mode) or not any(real.is_relative_to(root) for root in roots):
            raise ValueError
    real_folder = folder.resolve(strict=True)
    if not any(real_folder.is_relative_to(root) for root in roots):
        raise ValueError
    return real_folder
