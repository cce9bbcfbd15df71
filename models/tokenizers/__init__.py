"""Tokenizers: convert texts to token ids and back, and encode conversations, without remote code.

config.json decides the family: its model_type and, where families share one, other fields.
"""

from pathlib import Path

from models.config import read_json
from models.tokenizers.base import Message, Tokenizer
from models.tokenizers.chat import LLAMA2, TELECHAT
from models.tokenizers.huggingface import damage_refused, load_huggingface
from models.tokenizers.kimi import KIMI_RANKS, load_kimi
from models.tokenizers.sentencepiece import (
    BaichuanTokenizer,
    ChatGLM2Tokenizer,
    ChatGLMTokenizer,
    SentencePieceTokenizer,
)
from models.tokenizers.tekken import TEKKEN, load_tekken
from models.tokenizers.template_files import NAMED_TEMPLATES, chat_templates
from models.tokenizers.tiktoken import Llama3Tokenizer, QwenTokenizer
from models.tokenizers.tokenizer_json import read_settings

__all__ = ["TOKENIZER_FILES", "Message", "Tokenizer", "load_tokenizer"]

TOKENIZER_FILES = (  # patterns of the files from which a tokenizer is read
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "merges.txt",
    "*.jinja",
    f"{NAMED_TEMPLATES}/*.jinja",
    "*.model",
    "*.tiktoken",
)

CHATGLM3_LENGTH = 8192  # seq_length of ChatGLM3-6B's config.json; otherwise it is ChatGLM2-6B
CHATGLM2 = ("chatglm", "ChatGLMTokenizer", "chatglm_v2", "ChatGLMv2Tokenizer")  # the last two are PaddleNLP's names
PIECES = ("tokenizer.model", "sentencepiece.bpe.model")  # the second is PaddleNLP's name
PADDLE_TEMPLATE = "chat_template.json"  # PaddleNLP's chat format, which is not Jinja and is not read


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the folder's tokenizer, or None if it has no tokenizer files. Raises UserError if they cannot be read."""
    config = read_json(folder / "config.json") | read_json(folder / "tokenizer_config.json")
    kind = config.get("model_type") or config.get("tokenizer_class")
    pieces = next((folder / name for name in PIECES if (folder / name).is_file()), folder / PIECES[0])
    if kind in ("qwen", "QWenTokenizer") and (folder / "qwen.tiktoken").is_file():
        return QwenTokenizer(folder / "qwen.tiktoken")
    if (folder / "ice_text.model").is_file():
        return ChatGLMTokenizer(folder / "ice_text.model")
    if kind in CHATGLM2 and pieces.is_file():
        name, length = str(config.get("_name_or_path")), config.get("max_sequence_length", config.get("seq_length"))
        return ChatGLM2Tokenizer(pieces, has_roles="chatglm3" in name or length == CHATGLM3_LENGTH)
    if kind in ("baichuan", "BaichuanTokenizer") and pieces.is_file():
        generation = read_json(folder / "generation_config.json")
        turns = {role: generation.get(f"{role}_token_id") for role in ("user", "assistant")}
        is_second = read_json(folder / "config.json").get("tokenizer_class") == "BaichuanTokenizer"
        return BaichuanTokenizer(pieces, turns, eos_after_answers=not is_second)
    if config.get("tokenizer_class") == "TikTokenTokenizer" and (folder / KIMI_RANKS).is_file():
        return load_kimi(folder)
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        is_llama2 = kind == "llama" and pieces.is_file() and _is_sentencepiece(pieces)
        return load_huggingface(folder, LLAMA2 if is_llama2 else TELECHAT if kind == "telechat" else None)
    if pieces.is_file():
        if not _is_sentencepiece(pieces):
            return Llama3Tokenizer(pieces)
        tokenizer = SentencePieceTokenizer(pieces)
        is_llama = str(config.get("tokenizer_class", kind)).removesuffix("Fast") in ("llama", "LlamaTokenizer")
        with damage_refused(folder):
            tokenizer.read_settings(*read_settings(folder), is_llama)
        has_own = (folder / PADDLE_TEMPLATE).is_file()
        built_in_template = LLAMA2 if kind in (None, "llama", "LlamaTokenizer") and not has_own else None
        built_in_template = TELECHAT if kind == "telechat" else built_in_template
        tokenizer.take_templates(chat_templates(folder), built_in_template)
        return tokenizer
    if (folder / TEKKEN).is_file():
        return load_tekken(folder)
    return load_huggingface(folder) if (folder / "tokenizer_config.json").is_file() else None


def _is_sentencepiece(file: Path) -> bool:
    """Return whether a file is a protobuf that begins with a piece.

    tiktoken files may have the same name, but are lines of base64.
    """
    with open(file, "rb") as opened:
        return opened.read(1) == b"\n"
