"""Turns the plan of a step, or whole prompts, into tensors."""

import itertools
from typing import NamedTuple

from models.batch import Batch
from pipelines.engine.request import Sequence
from pipelines.engine.scheduler import Scheduled, StepPlan

UNKNOWN = 0  # stands for a token that only the device knows yet


class NewTokens(NamedTuple):
    """The tokens that a step computes of a sequence, whose block table has a slot for each of these tokens."""

    sequence: Sequence
    start: int
    """Position of the first one."""
    token_ids: list[int]
    num_outputs: int
    """How many of them, the last ones, have outputs that are wanted."""
    adapter_slot: int = -1
    """The sequence's adapter in the model's tables; -1 for none, and for a model that only drafts."""


def build_batch(plan: StepPlan, block_size: int, all_outputs: bool = False) -> Batch:
    """Flatten the plan's new tokens, each sequence's with its drafts after them, without padding.

    `all_outputs`: every token is an output row, not only those whose outputs the plan wants.
    """
    parts = [_new_tokens(item) for item in plan.scheduled]
    if all_outputs:
        parts = [part._replace(num_outputs=len(part.token_ids)) for part in parts]
    return flat_batch(parts, block_size)


def _new_tokens(item: Scheduled) -> NewTokens:
    known = item.sequence.token_ids[item.start : item.start + item.num_new_tokens]
    token_ids = known + [UNKNOWN] * (item.num_new_tokens - len(known)) + list(item.drafts)
    num_outputs = item.num_outputs + len(item.drafts)
    return NewTokens(item.sequence, item.start, token_ids, num_outputs, item.group.adapter_slot)


def flat_batch(parts: list[NewTokens], block_size: int) -> Batch:
    """Flatten the new tokens of sequences, without padding."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    prompt_lengths: list[int] = []
    context_lengths: list[int] = []
    output_rows: list[int] = []
    adapter_slots: list[int] = []
    starts, output_starts = [0], [0]
    for sequence, start, new_token_ids, num_outputs, adapter_slot in parts:
        table, prefix, after = sequence.block_table, sequence.prefix, start + len(new_token_ids)
        token_ids += new_token_ids
        positions += range(prefix.first_position + start, prefix.first_position + after)
        places = range(prefix.num_tokens + start, prefix.num_tokens + after)
        slots += [table[p // block_size] * block_size + p % block_size for p in places]
        length = len(sequence.token_ids) if sequence.is_past_threshold else sequence.num_prompt_tokens
        prompt_lengths += [0 if prefix.num_tokens else length] * len(new_token_ids)
        adapter_slots += [adapter_slot] * len(new_token_ids)
        context_lengths.append(prefix.num_tokens + after)
        end = len(token_ids)
        starts.append(end)
        output_rows += range(end - num_outputs, end)
        output_starts.append(len(output_rows))
    return Batch.of(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        block_tables=[part.sequence.block_table for part in parts],
        query_starts=starts,
        context_lengths=context_lengths,
        prompt_lengths=prompt_lengths,
        prompt_features=[part.sequence.prompt_features for part in parts],
        output_rows=output_rows,
        output_starts=output_starts,
        adapter_slots=adapter_slots if any(part.adapter_slot >= 0 for part in parts) else None,
    )


def whole_batch(
    prompts: list[list[int]],
    num_outputs: list[int],
    block_tables: list[list[int]],
    prompt_features: list[tuple[int, ...]],
    block_size: int,
) -> Batch:
    """Flatten whole prompts, each over its own blocks; the last `num_outputs` tokens of each are output rows."""
    lengths = [len(prompt) for prompt in prompts]
    ends = list(itertools.accumulate(lengths))
    places = [
        (table, position) for table, length in zip(block_tables, lengths, strict=True) for position in range(length)
    ]
    return Batch.of(
        token_ids=list(itertools.chain(*prompts)),
        positions=[position for _, position in places],
        slots=[table[p // block_size] * block_size + p % block_size for table, p in places],
        block_tables=block_tables,
        query_starts=[0, *ends],
        context_lengths=lengths,
        prompt_lengths=[length for length in lengths for _ in range(length)],
        prompt_features=prompt_features,
        output_rows=[row for end, n in zip(ends, num_outputs, strict=True) for row in range(end - n, end)],
        output_starts=[0, *itertools.accumulate(num_outputs)],
    )
