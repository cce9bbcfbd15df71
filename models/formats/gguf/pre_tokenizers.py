"""Split patterns of byte-level tokenizers, by llama.cpp's names (`tokenizer.ggml.pre`).

The patterns are from the families' tokenizer.json, in Oniguruma syntax; the names are from llama.cpp's
src/llama-vocab.cpp. Several patterns apply in sequence, each to the pieces of the previous one.
"""

from dataclasses import dataclass

from models.tokenizers.runner_form import GPT2_PATTERN
from models.tokenizers.tiktoken import LLAMA3_PATTERN, QWEN35_PATTERN, QWEN_PATTERN


@dataclass(frozen=True)
class PreTokenizer:
    patterns: tuple[str, ...]
    is_nfc: bool = False
    """Whether texts are normalised to Unicode NFC first."""
    whole_words_first: bool = False
    """Whether a piece that is a vocabulary entry becomes one token without merges."""
    adds_bos: bool = False
    """Whether BOS comes first if the file does not say."""
    is_byte_level: bool = True
    """Whether tokens are texts of bytes. If not, they are texts of characters, with ▁ for a space."""


UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
BEHIND_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_PATTERN = "|".join((*WORDS, r"\p{N}", BEHIND_WORDS))
GPT4O_PATTERN = "|".join((*(word + CONTRACTION for word in WORDS), r"\p{N}{1,3}", BEHIND_WORDS))
SEED_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# words that single spaces join are one piece
PHRASE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
BLOOM_PATTERN = r" ?[^(\s|[.,!?…。，、।۔،])]+"
FALCON_PATTERNS = r"[\p{P}$+<=>^~|`]+", GPT2_PATTERN, r"[0-9][0-9][0-9]"
RUNS = "|".join(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
JAIS2_PATTERN = LLAMA3_PATTERN.removesuffix(r"\s+(?!\S)|\s+") + RUNS + r"|\s"
CASED_LETTERS = (  # DeepSeek's list; Unicode now has more
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}"
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}"
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}"
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}"
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}"
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}"
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}"
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
DEEPSEEK_LLM_PATTERNS = (
    r"[\r\n]",
    rf"\s?[{CASED_LETTERS}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    CJK,
    r"\p{N}+",
)
DEEPSEEK_CODER_PATTERNS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}")
DEEPSEEK_V3_PATTERNS = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
LLAMA3 = PreTokenizer((LLAMA3_PATTERN,), whole_words_first=True, adds_bos=True)
QWEN2 = PreTokenizer((QWEN_PATTERN,), is_nfc=True)
BY_THREE_DIGITS = PreTokenizer((LLAMA3_PATTERN,))
PRE_TOKENIZERS = {  # the writer uses the first of equal ones
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4"), PreTokenizer((GPT2_PATTERN,))),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer((GPT2_PATTERN,), is_nfc=True)),
    **dict.fromkeys(("smollm", "starcoder"), PreTokenizer((r"\p{N}", GPT2_PATTERN))),
    "command-r": PreTokenizer((r"\p{N}", GPT2_PATTERN), is_nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan"), QWEN2),
    "stablelm2": PreTokenizer((QWEN_PATTERN,)),
    "qwen35": PreTokenizer((QWEN35_PATTERN,), is_nfc=True),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), BY_THREE_DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), PreTokenizer((GPT4O_PATTERN,))),
    "falcon": PreTokenizer(FALCON_PATTERNS),
    "jais-2": PreTokenizer((JAIS2_PATTERN,)),
    "tekken": PreTokenizer((TEKKEN_PATTERN,), whole_words_first=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM_PATTERNS),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER_PATTERNS),
    **dict.fromkeys(("deepseek-v3", "joyai-llm", "hunyuan-dense"), PreTokenizer(DEEPSEEK_V3_PATTERNS)),
    "seed-coder": PreTokenizer((SEED_PATTERN,)),
    "exaone-moe": PreTokenizer((PHRASE_PATTERN,)),
    "bloom": PreTokenizer((BLOOM_PATTERN,)),
}
"""By `tokenizer.ggml.pre`: GPT-2 (and Phi-2, EXAONE 4), MPT (and OLMo, GPT-NeoX), SmolLM (and StarCoder), Command R,
Llama 3 (and LFM2), Qwen (and Hunyuan A13B), StableLM 2, Qwen3.5, GLM-4 and Phi-4, Phi-4-mini (and Llama 4,
MiniMax-M2), Falcon, Jais 2, Mistral Nemo, DeepSeek's three (V3: also Hunyuan's dense models), Seed, K-EXAONE, BLOOM.
"""
GEMMA4 = PreTokenizer((r"[^\n]+|\n+",), whole_words_first=True, adds_bos=True, is_byte_level=False)
"""Of the tokenizer `gemma4`, whose files have no `tokenizer.ggml.pre`."""
