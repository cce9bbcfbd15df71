"""Random small models in transformers, and the comparison of ours with them."""

from pathlib import Path
from typing import Any

import torch

from conf.decoding import DecodeConfig
from tests.builders import SMALL, all_logits, complete, engine_of

NEW_TOKENS = 32
LENGTHS = (5, 1, 40, 17)


def write_model(folder: Path, model_class: Any, **config: Any) -> Any:
    """A random float32 model in Hugging Face layout, and transformers' model of it. Every parameter is random, also the biases."""
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**SMALL, **config})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    return model


def reference_greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def check_equals_transformers(folder: Path, model_class: Any, **config: Any) -> None:
    """Logits of whole prompts; greedy tokens alone, together, and with prompts cut into chunks."""
    reference = write_model(folder, model_class, **config)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 96, (length,), generator=generator).tolist() for length in LENGTHS]
    engine = engine_of(folder)
    for prompt in prompts:
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        # 1e-4: float32 sums in another order; the logits are of order 1 to 10
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=1e-4, rtol=0)
    decode = DecodeConfig(max_new_tokens=NEW_TOKENS)
    expected_ids = [reference_greedy(reference, prompt) for prompt in prompts]
    assert [complete(engine, [prompt], decode)[0].token_ids for prompt in prompts] == expected_ids
    chunked = engine_of(folder, max_batched_tokens=5, block_size=4)
    for either in (engine, chunked):
        assert [output.token_ids for output in complete(either, prompts, decode)] == expected_ids
