"""Two small tokenizers that differ in how text is split: bytes as letters (GPT-2) and byte fallback (Llama)."""

import json
from itertools import pairwise
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
    """SentencePiece as in Llama 2: ▁ for a space, one at the start, unknown characters as <0x..> bytes."""
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
    """Save a checkpoint's tokenizer files, with a chat template that writes the BOS itself."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": True,  # as in Llama 3; the text must still not be "cleaned"
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_pieces(folder: Path, is_legacy: bool) -> None:
    """Save SentencePiece's file with settings. is_legacy: whether a text after a special token begins with its own
    space."""
    from sentencepiece import SentencePieceTrainer  # an image with a GPU may lack it

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tokenizer.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 3),
            model_writer=file,
            model_type="bpe",
            vocab_size=380,
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": is_legacy, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


MIXED = [
    "中文English混合 of 汉字and kana かな汉カナ, 한국어 Ünïcode",
    "McDonald'S HTTPServer's WE'LL DON'T ÀÉ don't 1234567890 x2y",
    "(。，)  \t trailing   \r\n\r\n  next\nq",
]
NUM_MERGES = 600


def merged(parts: list[bytes], ranks: dict[bytes, int]) -> list[bytes]:
    """Merge the two neighbours whose merge has the lowest rank, the first of equal ones, until no merge applies."""
    while merges := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        _, i = min(merges)
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]
    return parts


def make_ranks() -> dict[bytes, int]:
    """Return merges of neighbours at every position, so that each split that the pattern misses would change the
    tokens."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    texts = [[bytes([byte]) for byte in text.encode()] for text in (*MIXED, *TEXTS, TRICKY)]
    while len(ranks) < 256 + NUM_MERGES:
        counts: dict[bytes, int] = {}
        for parts in texts:
            for a, b in pairwise(parts):
                if a + b not in ranks:
                    counts[a + b] = counts.get(a + b, 0) + 1
        if not counts:
            break
        for candidate in sorted(counts, key=lambda token: (-counts[token], token))[:20]:
            ranks[candidate] = len(ranks)
        texts = [merged(parts, ranks) for parts in texts]
    return ranks
