"""The pooler of a served model, which answers prompts without generation, and its description in the Ready frame."""

from typing import Any

from conf.schema import RunConfig
from models.heads import HeadKind
from models.tokenizers.pairs import has_answers
from pipelines.engine import Engine
from pipelines.loading.embedder import Embedder
from pipelines.loading.model_source import ModelSource
from pipelines.loading.open_pooler import check_embed_unset
from pipelines.loading.pooler import Pooler
from pipelines.loading.scorer import Scorer


def open_served_pooler(run: RunConfig, source: ModelSource, engine: Engine) -> Pooler | None:
    """Return the pooler. None: the model only generates text.

    Raises UserError for settings of `embed` if the model is not an embedding model.
    """
    if source.architecture.head is HeadKind.none:
        return Embedder(run.embed, run.predict, source, engine)
    check_embed_unset(run.embed)
    if source.architecture.num_labels is not None or has_answers(engine.tokenizer):
        return Scorer(run.score, run.predict, source, engine)
    return None


def pooled_fields(pooler: Pooler) -> dict[str, Any]:
    """Return the fields of Ready that describe pooled prompts."""
    settings = pooler.settings
    if isinstance(pooler, Scorer):
        names = {"labels": pooler.labels, "activation": pooler.activation}
        return {
            "pooled": "labels" if pooler.labels else "answer",
            "instruction": settings.get("instruction", ""),
            **names,
        }
    assert isinstance(pooler, Embedder)
    return {
        "pooled": "vector",
        "instruction": settings["instruction"],
        "query_instruction": pooler.query_instruction,
        "document_instruction": pooler.document_instruction,
        "final_token_id": settings["eos"],
        "max_text_tokens": settings["max_tokens"],
    }
