"""Prompts of a query and a document, by which a reranker scores the pair."""

from conf.errors import UserError
from models.tokenizers.base import Tokenizer

# From Qwen3-Reranker's model card: three pieces, which are tokenized separately.
TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
BEFORE = f"<|im_start|>system\n{TASK}<|im_end|>\n<|im_start|>user\n"
PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TURN = "<|im_start|>"
ANSWERS = ("no", "yes")
ROLES = ("query", "document")


def has_answers(tokenizer: Tokenizer | None) -> bool:
    """Whether yes and no are tokens."""
    try:
        return bool(answer_ids(tokenizer))
    except UserError:
        return False


def answer_ids(tokenizer: Tokenizer | None) -> list[int]:
    """Return the tokens no and yes, by which a model without a head of labels scores.

    Raises UserError without a tokenizer that has both.
    """
    if tokenizer is None:
        raise UserError("a model without a head of labels scores by its tokens yes and no: give model.tokenizer=PATH")
    answer_token_ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS]
    if any(len(token_ids) != 1 for token_ids in answer_token_ids):
        problem = "a model without a head of labels scores by the tokens yes and no, which this tokenizer does not have"
        raise UserError(
            f"{problem}: give a reward model, whose architecture ends in ForSequenceClassification, or a reranker"
        )
    return [token_ids[0] for token_ids in answer_token_ids]


def encode_question(tokenizer: Tokenizer, instruction: str, query: str, document: str) -> list[int]:
    """Return the prompt by which a causal model judges a pair with yes or no.

    Qwen3-Reranker's template if the tokenizer has its turn token; else one user turn in the model's own chat template.
    Raises UserError without a chat template.
    """
    pair = PAIR.format(instruction=instruction, query=query, document=document)
    if len(tokenizer.encode(TURN, add_special_tokens=False)) == 1:
        pieces = (BEFORE, pair, BEHIND)
        return [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    if tokenizer.chat_template is None and tokenizer.coded_chat_format is None:
        raise UserError(
            f"query and document need Qwen3-Reranker's token {TURN} or a chat template, and this tokenizer has neither: "
            "give this model's own format as prompt"
        )
    return tokenizer.encode_messages([{"role": "user", "content": f"{TASK}\n\n{pair}"}], None)[1]


def encode_pair(tokenizer: Tokenizer, query: str, document: str) -> list[int]:
    """Return the prompt of a pair for a head of labels: turns of the roles query and document, as sentence-transformers
    gives to a chat template. Raises UserError without a template for these roles."""
    if not all(role in (tokenizer.chat_template or "") for role in ROLES):
        raise UserError(
            "query and document need a chat template with the roles query and document, and this tokenizer has none: "
            "give the model's own format as a text or messages"
        )
    texts = zip(ROLES, (query, document), strict=True)
    return tokenizer.encode_messages([{"role": role, "content": text} for role, text in texts], None, False)[1]
