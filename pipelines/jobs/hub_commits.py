"""The hub ids of a run, with the commits that it reads. A branch or tag is resolved once, before anything is loaded."""

from dataclasses import replace

from conf.schema import ModelConfig, RunConfig, Task
from conf.speculation import Speculate
from models.formats.hub import find_commit, without_revision

TOKENIZER, DRAFT, REFERENCE = "model.tokenizer", "decode.speculation.model_path", "evaluate.reference"


def loads_a_model(run: RunConfig) -> bool:
    return not run.chat.url


def with_commits(run: RunConfig) -> RunConfig:
    """Return the run with the commit of each hub id: `model.revision` of the model, `@COMMIT` of the other models.

    Ids whose cache has no commits keep their revisions. Raises UserError for an id that cannot be downloaded.
    """
    if not loads_a_model(run):
        return run
    run = replace(run, model=_model_with_commits(run.model))
    speculation, evaluate = run.decode.speculation, run.evaluate
    if run.decode.speculate is Speculate.model and speculation.model_path:
        speculation = replace(speculation, model_path=_pinned(speculation.model_path, run.model, DRAFT))
        run = replace(run, decode=replace(run.decode, speculation=speculation))
    if run.task is Task.evaluate:
        run = replace(run, evaluate=replace(evaluate, reference=_pinned(evaluate.reference, run.model, REFERENCE)))
    return run


def hub_commits(run: RunConfig) -> dict[str, str]:
    """Return the hub ids of a run of `with_commits`, as `org/name@COMMIT` by dotted key."""
    model = run.model
    ids = {
        "model.path": model.path if model.revision is None else f"{model.path}@{model.revision}",
        TOKENIZER: model.tokenizer,
        DRAFT: run.decode.speculation.model_path,
        REFERENCE: run.evaluate.reference,
    }
    return {key: id for key, id in ids.items() if id and without_revision(id)[1]}


def _model_with_commits(model: ModelConfig) -> ModelConfig:
    commit = find_commit(model.path, model.hub, model.revision, "model.path")
    path, _ = without_revision(model.path)
    tokenizer = model.tokenizer and _pinned(model.tokenizer, model, TOKENIZER, model.revision)
    return replace(model, path=path, revision=commit or model.revision, tokenizer=tokenizer)


def _pinned(id: str, model: ModelConfig, key: str, revision: str | None = None) -> str:
    """Return a hub id with its commit. `revision`: of an id without its own. A path stays unchanged."""
    bare, own_revision = without_revision(id)
    commit = find_commit(id, model.hub, own_revision or revision, key)
    return id if commit is None else f"{bare}@{commit}"
