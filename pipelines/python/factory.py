"""`pipeline()`: make a pipeline from the names of config options, or from objects that a script has in memory."""

from typing import Any, Literal, overload

from conf.errors import UserError
from pipelines.python.composing import compose_run
from pipelines.python.held import compose_held, is_held
from pipelines.python.pooled_pipeline import EmbeddingPipeline, PooledPipeline, ScorePipeline
from pipelines.python.text_pipeline import TextGenerationPipeline

TASKS: dict[str, type[TextGenerationPipeline] | type[PooledPipeline]] = {
    "text_generation": TextGenerationPipeline,
    "embedding": EmbeddingPipeline,
    "score": ScorePipeline,
}


@overload
def pipeline(task: Literal["text_generation"], *options: Any, **arguments: Any) -> TextGenerationPipeline: ...


@overload
def pipeline(task: Literal["embedding", "score"], *options: Any, **arguments: Any) -> PooledPipeline: ...


@overload
def pipeline(task: str, *options: Any, **arguments: Any) -> TextGenerationPipeline | PooledPipeline: ...


def pipeline(
    task: str,
    model: Any = "tiny",
    quant: str = "none",
    decode: str = "greedy",
    device: str = "auto",
    parallel: str = "single",
    dtype: Any = None,
    tokenizer: Any = None,
    overrides: list[str] | None = None,
    **arguments: Any,
) -> TextGenerationPipeline | PooledPipeline:
    """Return a pipeline for the named config options.

    >>> pipe = pipeline("text_generation", model="tiny", decode="greedy", device="cpu")
    >>> pipe("Once upon a time", max_new_tokens=20)

    `model`: an option of conf/model, a folder, a GGUF file, a hub id or a PreTrainedModel of transformers, whose
    weights are copied in memory. `dtype`: a name or torch's dtype ("bfloat16", torch.bfloat16); None: as stored.
    `tokenizer`: a folder, a GGUF file, a hub id, a tokenizer of transformers or of another pipeline; None: the model's
    own. `overrides`: as on the command line. `arguments`: defaults for every call. Raises UserError, a ValueError, for
    an unknown task, option or argument, and if the model cannot be loaded.
    """
    if task not in TASKS:
        raise UserError(f"task {task!r} does not exist: there are {', '.join(TASKS)}")
    pipeline_class = TASKS[task]
    choices = {"quant": quant, "decode": decode, "device": device, "parallel": parallel, "task": pipeline_class.task}
    if is_held(model) or is_held(tokenizer):
        run, open_model = compose_held(model, choices, dtype, tokenizer, overrides or [])
        return pipeline_class(run, open_model, **arguments)
    return pipeline_class(compose_run(model, choices, dtype, tokenizer, overrides or []), **arguments)
