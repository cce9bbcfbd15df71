"""The device of a run, with the threads and the memory that the run assigns to it."""

import torch

from conf.constraints import typed
from conf.decoding import warn_once
from conf.errors import UserError
from conf.schema import DeviceConfig, DeviceType
from kernels import build
from kernels.threads import set_threads

DEFAULT_THREADS = torch.get_num_threads()  # torch's own choice, read before anything sets another number


def prepare_device(config: DeviceConfig) -> torch.device:
    """Return the device, and set its threads and memory.

    Raises UserError for a missing device and for unsupported options.
    """
    device = _device(config)
    _refuse_options_of_others(config, device)
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    if device.type == "cpu":
        set_threads(config.threads)
    else:
        warn_once("device=cuda: the Triton kernels are proved in the interpreter alone, no GPU has run them yet")
        torch.cuda.set_per_process_memory_fraction(float(config.memory_fraction))
        torch.cuda.reset_peak_memory_stats(device)
    return device


def _refuse_options_of_others(config: DeviceConfig, device: torch.device) -> None:
    options_by_device = {"cpu": ("decode_threads",), "cuda": ("cuda_graphs", "memory_fraction")}
    (other_device,) = options_by_device.keys() - {device.type}
    for name in options_by_device[other_device]:
        value, default = getattr(config, name), getattr(DeviceConfig(), name)
        if value != default:
            device_name = device.type.upper().replace("CUDA", "GPU")
            remedy = f"leave it at {typed(default)}, or give device={other_device}"
            raise UserError(f"device.{name}={typed(value)} is not used on a {device_name}: {remedy}")
    if config.decode_threads is not None and build.library() is None:
        raise UserError(
            f"device.decode_threads={config.decode_threads} needs the C++ kernels, which are off: leave it out"
        )


def _device(config: DeviceConfig) -> torch.device:
    if config.type is DeviceType.cuda and not torch.cuda.is_available():
        raise UserError(
            "device=cuda, but torch sees no CUDA device: give device=cpu or device=auto, or check the driver with nvidia-smi"
        )
    if config.type is DeviceType.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.type.name)
