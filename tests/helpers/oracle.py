"""Any family compared with transformers' model of it."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from models.config import ConfigReader
from models.registry import find_architecture
from tests.helpers.builders import SMALL, all_logits, complete, engine_of

NEW_TOKENS = 32
TOLERANCE = 1e-4  # float32 sums in another order; the logits are of order 1 to 10


def write_random(folder: Path, model: Any) -> Any:
    """Save transformers' model with random parameters, including norms, biases and corrections of routers, and return
    it."""
    torch.manual_seed(0)
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.15)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.15)
    model.save_pretrained(folder)
    return model


def write_model(folder: Path, model_class: Any, **config: Any) -> Any:
    """Do the same for transformers' class of a model in our small sizes."""
    return write_random(folder, model_class(model_class.config_class(**{**SMALL, **config})))


def random_prompts(vocab_size: int, lengths: tuple[int, ...] = (5, 1, 40, 17)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def assert_equals_transformers(
    folder: Path, reference: Any, prompts: list[list[int]], tolerance: float = TOLERANCE
) -> None:
    """Compare logits at every position, and greedy tokens of all prompts together, of the first alone, and of prompts
    in chunks of 5.

    Every key of the config must be read.
    """
    config = ConfigReader.from_folder(folder)
    find_architecture(config).read_config(config)
    assert config.unread() == []
    engine, decode = engine_of(folder), DecodeConfig(max_new_tokens=NEW_TOKENS)
    answers = [output.token_ids for output in complete(engine, prompts, decode)]
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = checked_logits(reference, prompt, answer)
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=tolerance, rtol=0)
        assert expected.abs().max() < 100
    assert complete(engine, prompts[:1], decode)[0].token_ids == answers[0]
    chunked = engine_of(folder, max_batched_tokens=5, block_size=4)
    assert [output.token_ids for output in complete(chunked, prompts, decode)] == answers


@torch.inference_mode()
def checked_logits(reference: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return transformers' logits [T, V] of a prompt, and check that the answer equals its greedy generation.

    If the angles of a position do not depend on the text's length, one pass over prompt and answer suffices: each token
    must be the most likely one after the tokens before it, or equally likely.
    """
    if not any(kind in str(getattr(reference.config, "rope_parameters", "")) for kind in ("dynamic", "longrope")):
        logits = reference(torch.tensor([prompt + answer])).logits[0]
        following = logits[len(prompt) - 1 : -1]
        chosen = following.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (following.amax(1) - chosen).max() <= TOLERANCE, (following.argmax(1).tolist(), answer)
        return logits[: len(prompt)]
    ids = torch.tensor([prompt])
    logits = copy.deepcopy(reference)(ids).logits[
        0
    ]  # a copy: the rotary embedding keeps the longest length of earlier calls
    output = copy.deepcopy(reference).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(answer), do_sample=False, pad_token_id=0
    )
    assert output[0, len(prompt) :].tolist() == answer
    return logits


@torch.inference_mode()
def contrastive_search(model: LlamaForCausalLM, prompt: list[int], alpha: float, k: int, count: int) -> list[int]:
    """Compute eq. 5 of arXiv 2202.06417 over whole recomputed sequences, in float64 from the hidden states on."""
    tokens = list(prompt)
    for _ in range(count):
        probabilities, candidates = model(torch.tensor([tokens])).logits[0, -1].double().softmax(-1).topk(k)
        scores = []
        for probability, candidate in zip(probabilities, candidates.tolist(), strict=True):
            hidden = (
                model(torch.tensor([[*tokens, candidate]]), output_hidden_states=True).hidden_states[-1][0].double()
            )
            similarity = torch.cosine_similarity(hidden[-1:], hidden[:-1]).max()
            scores.append((1 - alpha) * probability - alpha * similarity)
        tokens.append(candidates[torch.stack(scores).argmax()].item())
    return tokens[len(prompt) :]
