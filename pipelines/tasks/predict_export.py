"""`predict.export=true`: the run of the exported model, which is in the folder of the job."""

from dataclasses import replace
from pathlib import Path

from conf.quantization import CalibrateConfig, QuantizeConfig
from conf.schema import RunConfig
from models.formats.hub import find_checkpoint
from pipelines.jobs.journal import NAME as JOURNAL
from pipelines.jobs.journal import Fingerprint, named_folder
from pipelines.loading.fingerprint import calibration_fingerprint, file_fingerprint
from pipelines.loading.model_source import replace_model_path
from pipelines.tasks.export import check_exportable, export_model


def exported_run(run: RunConfig, output_dir: Path, name: str) -> tuple[RunConfig, Fingerprint]:
    """Return `run` with its exported model, and the fingerprint of the source model, which a resumed job compares.

    The export is the folder `name` of the job's folder. It is made here, unless the job is resumed. Raises UserError as
    `export_model` does, and for settings that an exported model does not accept.
    """
    resume, model = run.predict.resume, run.model
    folder = output_dir if resume in ("auto", "none") else named_folder(resume)
    is_resumed = resume != "none" and (folder / JOURNAL).exists()  # the export was finished before the journal began
    source = find_checkpoint(model.path, True, model.allow_pickle, model.hub, model.revision)
    source_fingerprint = file_fingerprint(source, "model")
    if run.quant.needs_calibration:
        source_fingerprint |= calibration_fingerprint(run.calibrate, run.quantize.format)
    check_exportable(run.model, run.parallel, run.device, "predict.export=true")
    if not is_resumed:
        plain_model = replace(model, max_length=None, prefixes=None, adapters=None)
        quant = replace(run.quant, activations=run.quant.activations.in_files)
        predict = replace(run.predict, adapter=None)
        export_model(replace(run, model=plain_model, quant=quant, predict=predict), folder / name, overwrite=True)
    model = replace(replace_model_path(model, folder / name), verify=False, allow_pickle=False)
    parts: Fingerprint = {f"export.{part}": value for part, value in source_fingerprint.items()}
    return replace(run, model=model, calibrate=CalibrateConfig(), quantize=QuantizeConfig()), parts
