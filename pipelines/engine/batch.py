"""Turns the plan of a step, or whole prompts, into tensors."""

import itertools

from models.batch import Batch
from pipelines.engine.scheduler import StepPlan

UNKNOWN = 0  # stands for a token that only the device knows yet


def build_batch(plan: StepPlan, block_size: int) -> Batch:
    """Flatten the plan's new tokens, each sequence's with its drafts behind them, without padding."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    prompt_lengths: list[int] = []
    context_lengths: list[int] = []
    output_rows: list[int] = []
    adapter_slots: list[int] = []
    starts, output_starts = [0], [0]
    for item in plan.scheduled:
        sequence, start, num_new_tokens = item.sequence, item.start, item.num_new_tokens
        known = sequence.token_ids[start : start + num_new_tokens]
        if item.drafts:
            known += item.drafts
            num_new_tokens += len(item.drafts)
        table, prefix, after = sequence.block_table, sequence.prefix, start + num_new_tokens
        token_ids += known + [UNKNOWN] * (num_new_tokens - len(known))
        positions += range(prefix.first_position + start, prefix.first_position + after)
        places = range(prefix.num_tokens + start, prefix.num_tokens + after)
        slots += [table[p // block_size] * block_size + p % block_size for p in places]
        length = len(sequence.token_ids) if sequence.is_past_border else sequence.num_prompt_tokens
        prompt_lengths += [length] * num_new_tokens
        adapter_slots += [item.group.adapter_slot] * num_new_tokens
        context_lengths.append(prefix.num_tokens + after)
        end = len(token_ids)
        starts.append(end)
        output_rows += range(end - item.num_outputs - len(item.drafts), end)
        output_starts.append(len(output_rows))
    return Batch.of(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        block_tables=[item.sequence.block_table for item in plan.scheduled],
        query_starts=starts,
        context_lengths=context_lengths,
        prompt_lengths=prompt_lengths,
        prompt_features=[item.sequence.prompt_features for item in plan.scheduled],
        output_rows=output_rows,
        output_starts=output_starts,
        adapter_slots=adapter_slots if any(item.group.adapter_slot >= 0 for item in plan.scheduled) else None,
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
