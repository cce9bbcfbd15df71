"""Text to token ids and back, chat templates: the tokenizer files of a checkpoint, read by transformers without remote code."""

from pathlib import Path
from typing import Any, cast

from sentencepiece import SentencePieceProcessor
from tokenizers import normalizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from conf.errors import UserError

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
LLAMA3_SPECIAL_TOKENS = [  # the first ids after the file's own, as Llama 3.1 names them
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
]


class Tokenizer:
    """The three things that the pipelines need of a tokenizer, with the same rules for every family."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        self._tokenizer = tokenizer
        self.folder = folder

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """The folder's tokenizer, or None where the folder holds no tokenizer files. Raises UserError if they cannot be read."""
        if not any((folder / name).is_file() for name in FILES):
            return None
        is_bare = not any((folder / name).is_file() for name in ("config.json", *FILES) if name != "tokenizer.model")
        try:
            if is_bare:
                tokenizer = _meta_tokenizer(folder)
            else:
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a damaged file makes the library raise
            raise UserError(
                f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error
        return cls(tokenizer, folder)

    @property
    def bos_token_id(self) -> int | None:
        return cast(int | None, self._tokenizer.bos_token_id)

    @property
    def eos_token_id(self) -> int | None:
        return cast(int | None, self._tokenizer.eos_token_id)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return cast(list[int], self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Exactly the tokens' text: no clean-up of spaces, whatever the tokenizer's settings say."""
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def apply_chat_template(self, messages: list[dict[str, Any]], template: str | None) -> str:
        """The conversation as text, ready for the assistant's turn. `template` is Jinja source; None: the tokenizer's own.

        Raises UserError where there is no template and where the template refuses the messages.
        """
        if template is None and not self._tokenizer.chat_template:
            raise UserError(
                f"the tokenizer in {self.folder} has no chat template: give predict.chat_template=PATH, or prompts instead of messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # the template's own raise_exception, or any fault of its Jinja
            raise UserError(f"the chat template does not take these messages: {error}") from error
        return cast(str, text)


def _meta_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Meta's tokenizer.model with nothing beside it: lines of base64 and rank (Llama 3), or else sentencepiece (Llama 1 and 2)."""
    file = folder / "tokenizer.model"
    with open(file, "rb") as stream:
        is_tiktoken = stream.readline(100).strip().endswith(b" 0")
    if is_tiktoken:
        converted = TikTokenConverter(str(file), extra_special_tokens=LLAMA3_SPECIAL_TOKENS).converted()
        begin, end = LLAMA3_SPECIAL_TOKENS[:2]
        return PreTrainedTokenizerFast(tokenizer_object=converted, bos_token=begin, eos_token=end, add_bos_token=True)
    tokenizer = LlamaTokenizer.from_pretrained(folder, local_files_only=True, add_bos_token=True)
    # Two things are done as sentencepiece does them: pieces are merged by their scores (transformers: by their ids), and a space is put
    # before every text (transformers: not before one that begins with a space).
    pieces = SentencePieceProcessor(model_file=str(file))
    scores = {pieces.id_to_piece(i): pieces.get_score(i) for i in range(pieces.get_piece_size())}
    merges = sorted(tokenizer._merges, key=lambda pair: -scores["".join(pair)])
    own = tokenizer.backend_tokenizer
    own.model = BPE(vocab=tokenizer._vocab, merges=merges, fuse_unk=True, byte_fallback=True)
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.pre_tokenizer = None
    return cast(PreTrainedTokenizerBase, tokenizer)
