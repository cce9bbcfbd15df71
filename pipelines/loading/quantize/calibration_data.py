"""Read the calibration samples, and the held-out samples of the report."""

import random
from dataclasses import dataclass
from itertools import islice

from conf.errors import UserError
from conf.quantization import CalibrateConfig
from models.tiny.corpus import documents
from models.tokenizers import Tokenizer
from pipelines.jobs.data_files import FORMS, DataFile, find_file
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import read_file

BUILT_IN_SEED = 20240607  # of the built-in texts
BUILT_IN_DOCUMENTS = 4000
NUM_HELD_OUT = 8  # samples that the report is measured on


@dataclass(frozen=True)
class CalibrationData:
    samples: list[list[int]]
    """Token ids of each sample, at most `sequence_length`."""
    held_out: list[list[int]]
    source: str
    """Origin of the texts, for people."""


def read_calibration_data(
    config: CalibrateConfig, tokenizer: Tokenizer | None, longest: int, are_prompts: bool
) -> CalibrationData:
    """Return samples of `sequence_length` tokens, cut from the concatenated texts and chosen by the seed.

    `config`: resolved settings. `longest`: maximum tokens of the model. `are_prompts`: a sample is a whole prompt, or
    its end; for models that see a whole prompt at once. Raises UserError for too little data, for texts that cannot be
    read, and for a missing tokenizer.
    """
    assert config.num_samples is not None
    assert config.sequence_length is not None
    length = min(config.sequence_length, longest)
    source = (
        config.data
        or "the built-in texts (short stories and questions in English and Chinese): give calibrate.data=FILE of your own"
    )
    rows = _encode(config.data, tokenizer)
    if are_prompts:
        samples = [row[-length:] for row in rows]
    else:
        ids = [token_id for row in rows for token_id in row]
        samples = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    num_needed = config.num_samples + NUM_HELD_OUT
    if len(samples) < num_needed:
        unit = "prompts" if are_prompts else f"samples of {length} tokens"
        raise UserError(
            f"calibrate.data has {len(samples)} {unit}, but calibrate.num_samples={config.num_samples} and {NUM_HELD_OUT} "
            "for the report are wanted: give more text, or fewer or shorter samples (calibrate.sequence_length)"
        )
    chosen = random.Random(config.seed).sample(range(len(samples)), num_needed)
    drawn = [samples[i] for i in chosen]
    return CalibrationData(drawn[: config.num_samples], drawn[config.num_samples :], source)


def built_in_tokens(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Return the first `num_tokens` tokens of the built-in texts."""
    token_ids: list[int] = []
    texts = documents(BUILT_IN_SEED)
    while len(token_ids) < num_tokens:
        token_ids += tokenizer.encode(next(texts), True)
    return token_ids[:num_tokens]


def calibration_file(data: str) -> DataFile:
    """Return the file of `calibrate.data`. Raises UserError if it does not exist."""
    missing = "is not a file: give a .txt or a .jsonl, .csv or .json, or .gz of these"
    return find_file("calibrate.data", data, FORMS, missing, columns=("text", "prompt"))


def _encode(data: str | None, tokenizer: Tokenizer | None) -> list[list[int]]:
    encoder = PromptEncoder(tokenizer, add_special_tokens=True, chat_template="auto")
    if data is None:
        if tokenizer is None:
            raise UserError(
                "calibration needs a tokenizer, or calibrate.data with prompt_token_ids: give model.tokenizer=PATH"
            )
        return [tokenizer.encode(text, True) for text in islice(documents(BUILT_IN_SEED), BUILT_IN_DOCUMENTS)]
    rows = []
    for row in read_file(calibration_file(data), takes_texts=True):
        try:
            rows.append(encoder.encode(row).token_ids)
        except UserError as error:
            raise UserError(f"row {row.index} of calibrate.data={data}: {error}") from error
    return rows
