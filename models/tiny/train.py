"""Train the bundled model: `python -m models.tiny.train --output models/tiny` (about an hour on two cores).

The training loop uses the Llama of transformers, so that the checkpoint also tests this project's own Llama
independently. The seed determines the text (`corpus.py`), the byte-level BPE tokenizer and the initial weights.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from models.tiny.corpus import END_OF_TEXT, TURN_END, TURN_START, documents

VOCAB_SIZE = 1536
TOKENS_PER_STEP = 4096
SHORT, LONG = 256, 1024  # most steps use short sequences; the last steps use long ones for the late positions
LONG_SHARE = 0.12
# Weights in the loss. Questions cannot be predicted, and prose is learned long before the answers.
QUESTION_WEIGHT, PROSE_WEIGHT, ANSWER_WEIGHT = 0.02, 0.2, 1.0
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer. Each digit is one token, so that arithmetic sees decimal places.

    GGUF calls this pre-tokenizer `smollm`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(documents(seed), 20_000), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, 0)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": LONG,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def token_stream(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[int, float]]:
    """Yield (token id, weight in the loss): BOS, document, BOS, document, and so on.

    Each BOS also ends the previous document.
    """
    stream = documents(seed)
    turn_start, user = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id("user")
    while True:
        for encoding in tokenizer.encode_batch(list(itertools.islice(stream, 512))):
            weight = PROSE_WEIGHT
            for token, following in zip(encoding.ids, [*encoding.ids[1:], None], strict=True):
                if token == turn_start:
                    weight = QUESTION_WEIGHT if following == user else ANSWER_WEIGHT
                yield token, weight


def build_model(vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=LONG, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=[0, 2],
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Muon(torch.optim.Optimizer):
    """The Muon optimizer for the matrices of the layers (Keller Jordan 2024, github.com/KellerJordan/Muon).

    It uses float32. torch's own Muon iterates in bfloat16, which is five times slower on a CPU without bfloat16
    instructions.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, parameters in by_shape.items():
                updates = []
                for p in parameters:
                    assert p.grad is not None
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(parameters, orthogonalised(torch.stack(updates)), strict=True):
                    p.add_(update, alpha=-group["lr"] * scale)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [N, R, C] with singular values moved towards 1 by five Newton-Schulz steps."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result


def train(
    model: LlamaForCausalLM, stream: Iterator[tuple[int, float]], minutes: float, peak_rate: float
) -> Iterator[int]:
    """Train with a cosine schedule over `minutes`. Prints the loss every 100 steps, and yields after each step."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    vectors = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        Muon(matrices, lr=10 * peak_rate),
        torch.optim.AdamW(vectors, lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [10 * peak_rate, peak_rate]
    model.model.compile()  # 4.5 instead of 3.7 thousand tokens/s on two AVX2 cores
    start, losses = time.monotonic(), []
    for step in itertools.count(1):
        share = (time.monotonic() - start) / (60 * minutes)
        if share >= 1:
            return
        schedule = min(1.0, step / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule
        length = LONG if share > 1 - LONG_SHARE else SHORT
        tokens, weights = zip(*itertools.islice(stream, TOKENS_PER_STEP), strict=True)
        ids = torch.tensor(tokens).view(-1, length)  # [B, T]
        weight = torch.tensor(weights).view(-1, length)[:, 1:].reshape(-1)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # [B, T-1, D]
        logits = model.lm_head(hidden.reshape(-1, hidden.shape[-1]))
        losses_by_token = torch.nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1), reduction="none")
        loss = (losses_by_token * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            seconds = time.monotonic() - start
            mean = sum(losses[-100:]) / 100
            print(
                f"step {step}  loss {mean:.4f}  {step * TOKENS_PER_STEP / seconds:.0f} tokens/s  {share:.0%}",
                flush=True,
            )
        yield step


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    c = model.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{
            k: getattr(c, k)
            for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        },
        **{
            k: getattr(c, k)
            for k in ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act")
        },
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": [0, 2],
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": [0, 2]}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of Adam; Muon's is ten times that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="folder of a checkpoint to continue from, with a new schedule")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = (
        Tokenizer.from_file(str(options.resume / "tokenizer.json")) if options.resume else train_tokenizer(options.seed)
    )
    save_tokenizer(tokenizer, options.output)
    model = build_model(tokenizer.get_vocab_size())
    if options.resume:
        weights = load_file(options.resume / "model.safetensors")
        model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    for step in train(model, token_stream(tokenizer, options.seed + 1), options.minutes, options.rate):
        if step % 500 == 0:
            save_model(model, options.output)
    save_model(model, options.output)


if __name__ == "__main__":
    main()
