"""Two small tokenizers of the kinds that matter for text in pieces: bytes as letters (GPT-2) and byte fallback (Llama)."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "Once upon a time, there was a little girl. She said: hello, world! It was a good day for the dog.",
    "今天天气很好，我们一起去公园玩。小明说：“你好！”",
    "don't stop 12345 ... (really)  two  spaces\n\nnew paragraph\ttab",
]
TRICKY = "  leading spaces, 今天天气 is 好, emoji 👩‍👩‍👧🇨🇳🙂, ñandú … naïve\n\n  end  "


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>"]
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Sentencepiece's way as Llama 2 uses it: ▁ for a space, one in front, unknown characters as <0x..> bytes."""
    words = sorted({piece for text in TEXTS[:1] for piece in text.replace(" ", " ▁").split(" ")})
    letters = sorted(set("▁" + "".join(words) + "今天"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", letter) for letter in letters if letter != "▁"]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """As a checkpoint's tokenizer files, with a chat template that writes the BOS itself."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": True,  # as Llama 3 has it; the text must not be "cleaned" all the same
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
