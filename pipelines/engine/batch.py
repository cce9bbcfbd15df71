"""Build the model's input tensors from a step plan or from whole prompts."""

import itertools
from collections.abc import Collection, Iterable
from typing import NamedTuple

from models.batch import Batch
from pipelines.engine.request import Sequence
from pipelines.engine.scheduler import Scheduled, StepPlan
from pipelines.engine.state_manager import StateSlots

UNKNOWN = 0  # placeholder for a token that the CPU has not received yet


class NewTokens(NamedTuple):
    """The tokens of one sequence that a step computes. The sequence's block table has a slot for each of them."""

    sequence: Sequence
    start: int
    """Position of the first of these tokens."""
    token_ids: list[int]
    num_outputs: int
    """The last `num_outputs` tokens are output rows."""
    adapter_slot: int = -1
    """Slot of the sequence's adapter in the model's tables; -1 for no adapter, and for a draft model."""
    state_slots: StateSlots | None = None
    """None: the model has no recurrent layer, or drafts."""
    num_drafts: int = 0
    """The last `num_drafts` tokens are drafts, which the recurrent state after the step does not include."""


def build_batch(plan: StepPlan, block_size: int, all_outputs: bool = False) -> Batch:
    """Flatten the plan's new tokens without padding. Draft tokens follow the new tokens of their sequence.

    `all_outputs`: make every token an output row, not only the rows that the plan needs.
    """
    parts = [_new_tokens(item) for item in plan.scheduled]
    if all_outputs:
        parts = [part._replace(num_outputs=len(part.token_ids)) for part in parts]
    return flat_batch(parts, block_size)


def _new_tokens(item: Scheduled) -> NewTokens:
    known = item.sequence.token_ids[item.start : item.start + item.num_new_tokens]
    token_ids = known + [UNKNOWN] * (item.num_new_tokens - len(known)) + list(item.drafts)
    num_drafts, adapter_slot = len(item.drafts), item.group.adapter_slot
    num_outputs = item.num_outputs + num_drafts
    return NewTokens(item.sequence, item.start, token_ids, num_outputs, adapter_slot, item.state_slots, num_drafts)


def flat_batch(parts: list[NewTokens], block_size: int, is_draft: bool = False) -> Batch:
    """Flatten new tokens without padding. `is_draft`: for a draft model, whose layers all have the same blocks."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    prompt_lengths: list[int] = []
    context_lengths: list[int] = []
    output_rows: list[int] = []
    adapter_slots: list[int] = []
    state_ends: list[int] = []
    window_slots: list[int] = []
    window_tables = [part.sequence.window_table for part in parts if part.sequence.window_table and not is_draft]
    state_slots = [part.state_slots for part in parts if part.state_slots is not None]
    starts, output_starts = [0], [0]
    for sequence, start, new_token_ids, num_outputs, adapter_slot, slots_of_state, num_drafts in parts:
        table, prefix, after = sequence.block_table, sequence.prefix, start + len(new_token_ids)
        token_ids += new_token_ids
        positions += range(prefix.first_position + start, prefix.first_position + after)
        places = range(prefix.num_tokens + start, prefix.num_tokens + after)
        slots += _slots(table, places, block_size)
        if window_tables:
            window_slots += _slots(sequence.window_table, places, block_size)
        length = len(sequence.token_ids) if sequence.is_past_threshold else sequence.num_prompt_tokens
        prompt_lengths += [0 if prefix.num_tokens else length] * len(new_token_ids)
        adapter_slots += [adapter_slot] * len(new_token_ids)
        context_lengths.append(prefix.num_tokens + after)
        end = len(token_ids)
        starts.append(end)
        output_rows += range(end - num_outputs, end)
        output_starts.append(len(output_rows))
        state_ends += [end - num_drafts] if slots_of_state else []
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
        adapter_slots=adapter_slots if any(part.adapter_slot >= 0 for part in parts) else (),
        state_reads=[slots.read for slots in state_slots],
        state_writes=[slots.write for slots in state_slots],
        state_ends=state_ends,
        window_slots=window_slots,
        window_tables=window_tables,
    )


def _slots(table: list[int], places: Iterable[int], block_size: int) -> list[int]:
    return [table[p // block_size] * block_size + p % block_size for p in places]


def prompt_batch(
    prompts: list[list[int]],
    num_outputs: list[int],
    block_tables: list[list[int]],
    prompt_features: list[tuple[int, ...]],
    block_size: int,
    is_recurrent: bool = False,
    window_tables: Collection[list[int]] = (),
) -> Batch:
    """Flatten whole prompts, each with its own blocks. The last `num_outputs` tokens of each prompt are output rows.

    `is_recurrent`: whether the model has recurrent layers. Their states are not kept. `window_tables`: the blocks of the
    layers with windows, unless all layers have the same blocks.
    """
    lengths = [len(prompt) for prompt in prompts]
    ends = list(itertools.accumulate(lengths))

    def slots(tables: Iterable[list[int]]) -> list[int]:
        parts = (_slots(table, range(length), block_size) for table, length in zip(tables, lengths, strict=True))
        return [*itertools.chain(*parts)]

    return Batch.of(
        token_ids=list(itertools.chain(*prompts)),
        positions=[position for length in lengths for position in range(length)],
        slots=slots(block_tables),
        block_tables=block_tables,
        query_starts=[0, *ends],
        context_lengths=lengths,
        prompt_lengths=[length for length in lengths for _ in range(length)],
        prompt_features=prompt_features,
        output_rows=[row for end, n in zip(ends, num_outputs, strict=True) for row in range(end - n, end)],
        output_starts=[0, *itertools.accumulate(num_outputs)],
        state_reads=[-1] * len(prompts) * is_recurrent,
        state_writes=[-1] * len(prompts) * is_recurrent,
        state_ends=ends * is_recurrent,
        window_slots=slots(window_tables) if window_tables else (),
        window_tables=window_tables,
    )
