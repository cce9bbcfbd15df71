"""Turns a request into the group of sequences that the scheduler runs."""

from models.tokenizers import Tokenizer
from pipelines.engine.beam_search import BeamSearch
from pipelines.engine.contrastive_search import ContrastiveSearch
from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.pooling import PromptPooling
from pipelines.engine.request import Pooling, Request, Search, Sequence, SequenceGroup


def begin_group(request: Request, tokenizer: Tokenizer | None, prompt_features: tuple[int, ...]) -> SequenceGroup:
    """Return the group of a new request, with its search. `prompt_features`: as `CausalLM.prompt_features`."""
    params, pooling = request.params, request.pooling
    origin = Sequence.begin(request, make_detokenizer(request, tokenizer))
    origin.prompt_features = prompt_features
    if params.prompt_logprobs is not None or params.penalty_alpha > 0 or pooling in (Pooling.mean, Pooling.cls):
        origin.first_output_position = 0
    search: Search | None = None
    if params.num_beams > 1:
        search = BeamSearch(params, origin.detokenizer)
    elif params.penalty_alpha > 0:
        search = ContrastiveSearch()
    elif pooling:
        search = PromptPooling(pooling)
    return SequenceGroup(request, origin, search)


def make_detokenizer(request: Request, tokenizer: Tokenizer | None) -> Detokenizer | None:
    """Return the detokenizer of a request; None without a tokenizer."""
    if tokenizer is None:
        return None
    params, skip = request.params, request.params.skip_special_tokens

    def hidden_text(id: int) -> str:
        is_hidden = skip and params.stop and tokenizer.token_bytes(id) is None
        return tokenizer.decode([id], skip_special_tokens=False) if is_hidden else ""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip)

    return Detokenizer(decode, request.prompt_token_ids, params.stop, params.include_stop, hidden_text)
