"""Any family against transformers' own model of it."""

import copy
from pathlib import Path
from typing import Any

import torch

from conf.decoding import DecodeConfig
from models.config import ConfigReader
from models.registry import find_architecture
from tests.helpers.builders import SMALL, all_logits, complete, engine_of

NEW_TOKENS = 32
TOLERANCE = 1e-4  # float32 sums in another order; the logits are of order 1 to 10


def write_random(folder: Path, model: Any) -> Any:
    """Saves transformers' model with every parameter random, also norms, biases and corrections of routers; returns it."""
    torch.manual_seed(0)
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return model


def write_model(folder: Path, model_class: Any, **config: Any) -> Any:
    """The same for transformers' class of a model of our small sizes."""
    return write_random(folder, model_class(model_class.config_class(**{**SMALL, **config})))


def random_prompts(vocab_size: int, lengths: tuple[int, ...] = (5, 1, 40, 17)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def assert_equals_transformers(folder: Path, reference: Any, prompts: list[list[int]]) -> None:
    """Logits at every position, and greedy tokens alone, together, and with prompts cut into chunks of 5; every key of the config read."""
    config = ConfigReader.from_folder(folder)
    find_architecture(config).read_config(config)
    assert config.unread() == []
    engine = engine_of(folder)
    expected_ids = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = copy.deepcopy(reference)(ids).logits[0]
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=TOLERANCE, rtol=0)
        assert expected.abs().max() < 100
        # A fresh copy, because transformers' rotary embedding keeps the longest length of earlier calls.
        output = copy.deepcopy(reference).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        expected_ids.append(output[0, len(prompt) :].tolist())
    decode = DecodeConfig(max_new_tokens=NEW_TOKENS)
    assert [complete(engine, [prompt], decode)[0].token_ids for prompt in prompts] == expected_ids
    assert [output.token_ids for output in complete(engine, prompts, decode)] == expected_ids
    chunked = engine_of(folder, max_batched_tokens=5, block_size=4)
    assert [output.token_ids for output in complete(chunked, prompts, decode)] == expected_ids


def check_equals_transformers(folder: Path, model_class: Any, **config: Any) -> None:
    """A random model of our small sizes, with other settings."""
    reference = write_model(folder, model_class, **config)
    assert_equals_transformers(folder, reference, random_prompts(SMALL["vocab_size"] or 0))
