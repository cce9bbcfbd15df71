"""The file of `quant.plan`: a YAML with the format of each layer, as quant=auto chose it."""

from dataclasses import replace
from pathlib import Path

import yaml

from conf.errors import UserError
from conf.quantization import QuantConfig, QuantMethod, QuantScheme
from models.causal_lm import CausalLM
from models.linear_layers import linear_specs

OVERRIDES = "overrides"  # the plan's only key


def plan_text(formats: dict[str, str], title: str) -> str:
    """Return the content of a plan: the format of each layer, by name. `title`: a comment for people."""
    content = yaml.safe_dump({OVERRIDES: formats}, sort_keys=False, width=200)
    return f"# {title}\n{content}"


def resolve_plan(config: QuantConfig, model: CausalLM) -> QuantConfig:
    """Return the options with the formats of `quant.plan` as overrides. The given overrides and `skip` win.

    Raises UserError for a file without a plan, and for layers that the model lacks.
    """
    assert config.plan is not None
    path = Path(config.plan).expanduser()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"quant.plan={path} cannot be read: {' '.join(str(error).split())}") from error
    formats = content.get(OVERRIDES) if isinstance(content, dict) else None
    if not isinstance(formats, dict) or not all(isinstance(text, str) for text in (*formats, *formats.values())):
        raise UserError(f"quant.plan={path} is not a plan: give the file that a run with quant=auto quant.bits wrote")
    layers = linear_specs(model)
    if unknown := [name for name in formats if name not in layers]:
        raise UserError(
            f"quant.plan={path} has {len(unknown)} layers that this model lacks ({', '.join(unknown)}): "
            "give the plan of this model"
        )
    scheme = QuantScheme.q4_k if config.method is QuantMethod.imatrix else QuantScheme.int8  # used by no layer
    return replace(config, scheme=scheme, plan=None, group_size=-1, overrides=formats | config.overrides)
