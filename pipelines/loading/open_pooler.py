"""Load the model of `task=embed` or `task=score`, and choose its pooler."""

from conf.constraints import unused
from conf.pooling import EmbedConfig
from conf.schema import RunConfig, Task
from models.heads import HeadKind
from pipelines.engine import Engine
from pipelines.engine.request_factory import check_pooled
from pipelines.jobs import report
from pipelines.loading.cosine_scorer import CosineScorer
from pipelines.loading.embedder import Embedder
from pipelines.loading.load_engine import open_engine
from pipelines.loading.model_source import ModelSource, OpenModel
from pipelines.loading.pooler import Pooler
from pipelines.loading.scorer import Scorer


def open_pooler(
    run: RunConfig, progress: report.ProgressSink = report.NO_PROGRESS, open_model: OpenModel | None = None
) -> tuple[ModelSource, Pooler]:
    """Load the model of `run`. `open_model`: as for `load_engine`.

    Raises UserError as `load_engine` and `pooler_of` do, and for `decode` settings.
    """
    check_pooled(run.decode)
    head = HeadKind.none if run.task is Task.embed else None
    source, engine = open_engine(run, run.predict.batch_size, progress, head, open_model)
    return source, pooler_of(run, source, engine)


def pooler_of(run: RunConfig, source: ModelSource, engine: Engine) -> Pooler:
    """Return the pooler of the task for a loaded model. Raises UserError for settings that contradict the checkpoint."""
    if run.task is Task.embed:
        return Embedder(run.embed, run.predict, source, engine)
    if source.architecture.head is HeadKind.none:
        return CosineScorer(run.score, run.embed, run.predict, source, engine)
    check_embed_unset(run.embed)
    return Scorer(run.score, run.predict, source, engine)


def check_embed_unset(embed: EmbedConfig) -> None:
    """Raise UserError for settings of `embed`, which only an embedding model reads."""
    if embed != EmbedConfig():
        by = "a model without a pooling in modules.json, which is not an embedding model"
        raise unused("embed", embed, EmbedConfig(), by, "task=embed")
