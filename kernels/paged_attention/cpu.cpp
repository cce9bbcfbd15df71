// Causal attention over the paged cache. kernels/paged_attention/reference.py is the specification.
//
// A row is one query head of one new token; D channels per key, E per value. Rows of one sequence and one key/value
// head share the keys and values that they read. A word is 32 bits: one float32 or two bfloat16, the dtype of the
// products.
//
// The bits of a row depend only on its token's position, not on other rows, steps, chunks or threads: keys are
// processed in tiles counted from the start of the sequence, and tiles in splits. A split is summed by online softmax
// (arXiv 1805.02867) in the order of its tiles, and splits are combined in order. If a row attends to no key of a tile or
// split, that tile or split changes none of the row's bits.
#include <algorithm>
#include <limits>
#include <vector>

#include "../exp.h"
#include "../operator.h"
#include "../aligned_buffer.h"
#include "../threads.h"
#include "operands.h"

namespace {

constexpr int64_t FEW_ROWS = 8;          // the products of this many rows take as long as packing their keys and values
constexpr int64_t CHUNK_WORK = 1 << 15;  // multiplications that justify another thread: a microsecond, five times the cost of waking it
constexpr float LOWEST = std::numeric_limits<float>::lowest(), INFINITE = std::numeric_limits<float>::infinity();

// Softmax over some keys, before normalisation: the highest score, the sum of exp(score - highest), and the sum of values
// times exp(score - highest).
struct Partial {
  float *highest, *sum;  // [rows]
  float *values;         // [rows, E padded]

  static int64_t size(int64_t rows, int64_t width) { return rows * (2 + width); }
  Partial(float *at, int64_t rows, int64_t width) : highest(at + rows * width), sum(highest + rows), values(at) {}
  static Partial empty(float *at, int64_t rows, int64_t width) {
    std::fill_n(at, rows * width, 0.0f);
    std::fill_n(at + rows * width, rows, LOWEST);
    std::fill_n(at + rows * width + rows, rows, 0.0f);
    return {at, rows, width};
  }
};

// --- softmax ---

Floats lane_numbers() {
  alignas(64) static constexpr float NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(NUMBERS);
}

// Scores of one row in a tile.
using TileScores = Floats[VECTORS];

void apply_options(const Rows &rows, int64_t row, int64_t first, TileScores &x) {
  const Call &call = rows.call;
  for (Floats &scores : x) {
    const int64_t i = &scores - x;
    if (call.soft_cap != 0) scores = multiply(splat(call.soft_cap), tanh(divide(scores, splat(call.soft_cap))));
    if (call.slopes) {
      const Floats distance = add(lane_numbers(), splat(static_cast<float>(first + i * LANES - rows.position(row))));
      scores = add(scores, multiply(splat(call.slopes[rows.head(row)]), distance));
    }
  }
}

// Replaces the scores, weights or scales of keys that the row does not attend to.
void hide_keys(const Rows &rows, int64_t row, int64_t first, float hidden, TileScores &x) {
  const int64_t begin = std::max<int64_t>(rows.begin(row) - first, 0), end = std::min(rows.end(row) - first, TILE);
  if (begin <= 0 && end >= TILE) return;
  float scores[TILE];
  for (int64_t i = 0; i < VECTORS; ++i) store(scores + i * LANES, x[i]);
  std::fill(scores, scores + begin, hidden);
  std::fill(scores + end, scores + TILE, hidden);
  for (int64_t i = 0; i < VECTORS; ++i) x[i] = load(scores + i * LANES);
}

// Converts the row's scores of keys first to first + 63 into weights. scratch.sums receives the sum of the weights.
// scratch.rescale receives the logarithm of the factor by which the sums of earlier tiles are multiplied.
template <bool BFLOAT16> void compute_row_weights(const Rows &rows, int64_t row, int64_t first, Partial &partial, Scratch &scratch) {
  const Call &call = rows.call;
  const float *scores = scratch.scores + row * TILE;
  TileScores x;
  UNROLL
  for (int64_t i = 0; i < VECTORS; ++i) x[i] = multiply(load(scores + i * LANES), splat(call.scale * scratch.query_scales[row]));
  if (call.soft_cap != 0 || call.slopes) apply_options(rows, row, first, x);
  hide_keys(rows, row, first, -INFINITE, x);
  Floats top = x[0];
  UNROLL
  for (int64_t i = 1; i < VECTORS; ++i) top = larger(top, x[i]);
  const float before = partial.highest[row], highest = std::max(before, largest(top));
  Floats total = splat(0.0f);
  UNROLL
  for (int64_t i = 0; i < VECTORS; ++i) {
    const Floats weight = exp(subtract(x[i], splat(highest)));
    total = add(total, weight);
    if (BFLOAT16 && PAIR_WORDS == 1)
      store_bfloat16(reinterpret_cast<uint16_t *>(scratch.weights) + row * TILE + i * LANES, weight);
    else
      store(reinterpret_cast<float *>(scratch.weights) + row * TILE + i * LANES, BFLOAT16 ? round_to_bfloat16(weight) : weight);
  }
  scratch.rescale[row] = before - highest;
  scratch.sums[row] = sum(total);
  partial.highest[row] = highest;
}

void compute_weights(const Rows &rows, int64_t first_row, int64_t last_row, int64_t first, Partial &partial, Scratch &scratch) {
  const bool is_half = rows.call.keys.dtype == Dtype::bfloat16 && !rows.call.multiplies_codes;
  for (int64_t row = first_row; row < last_row; ++row) {
    scratch.prefetcher.step(PREFETCH_STEP);
    (is_half ? compute_row_weights<true> : compute_row_weights<false>)(rows, row, first, partial, scratch);
  }
  for (int64_t row = first_row / LANES * LANES; row < last_row; row += LANES) store(scratch.rescale + row, exp(load(scratch.rescale + row)));
  for (int64_t row = first_row; row < last_row; ++row) partial.sum[row] = partial.sum[row] * scratch.rescale[row] + scratch.sums[row];
}

// The codes of the row's weights times `scales`, and the sum of the weights times `minimums`, which may be null.
void write_weight_codes(const Rows &rows, int64_t row, int64_t first, const float *scales, const float *minimums, uint16_t *codes, Scratch &scratch) {
  const float *weights = reinterpret_cast<const float *>(scratch.weights) + row * TILE;
  const auto multiplied = [&](const float *factors, TileScores &x) {
    UNROLL
    for (int64_t i = 0; i < VECTORS; ++i) x[i] = multiply(load(weights + i * LANES), load(factors + i * LANES));
    hide_keys(rows, row, first, 0, x);  // 0 times NaN is NaN
  };
  TileScores x;
  multiplied(scales, x);
  float scaled[TILE];
  for (int64_t i = 0; i < VECTORS; ++i) store(scaled + i * LANES, x[i]);
  scratch.weight_scales[row] = round_to_codes(scaled, TILE, codes + row * TILE);
  scratch.shifts[row] = 0;
  if (!minimums) return;
  multiplied(minimums, x);
  scratch.shifts[row] = sum(add(add(x[0], x[1]), add(x[2], x[3])));
}

void attend_codes(const Rows &rows, int64_t a, int64_t b, int64_t first, Product attended, Scratch &scratch) {
  const PagedVectors &cache = rows.call.values;
  const Groups groups(cache);
  const bool is_int4 = cache.format == KVFormat::int4;
  const int64_t tiles_of_group = groups.count == 1 ? attended.num_tiles : groups.size / LANES;
  const float *scales = gather_scales(rows, cache, first, scratch);
  alignas(64) uint16_t codes[MAX_ROWS * TILE];
  attended.x = reinterpret_cast<const int32_t *>(codes);
  for (int64_t tile = 0; tile < attended.num_tiles; tile += tiles_of_group, scales += (is_int4 ? 2 : 1) * TILE) {
    for (int64_t row = a; row < b; ++row)
      write_weight_codes(rows, row, first, scales, is_int4 ? scales + TILE : nullptr, codes, scratch);
    multiply_value_codes(attended, tile, std::min(tiles_of_group, attended.num_tiles - tile), scratch.weight_scales, scratch.shifts, a, b);
  }
}

// Computes rows a to b - 1 one by one. Values that the row does not attend to are replaced by zeros, because their weight
// is 0, and 0 times NaN is NaN.
void attend_row_by_row(const Rows &rows, int64_t a, int64_t b, int64_t first, const Product &attended, uint8_t *values, Scratch &scratch,
                  TileHeight &height) {
  const Dtype dtype = rows.call.keys.dtype;
  const int64_t bytes = rows.call.value_words() * WORD_BYTES;
  uint8_t *zeros = aligned_buffer(scratch.zeros, bytes);
  std::memset(zeros, 0, bytes);
  for (int64_t row = a; row < b; ++row) {
    const uint8_t *visible[TILE];
    for (int64_t i = 0; i < TILE; ++i) visible[i] = rows.begin(row) <= first + i && first + i < rows.end(row) ? scratch.addresses[i] : zeros;
    pack_values(visible, dtype, attended.num_tiles, values);
    compute(dtype, attended, row, row + 1, height);
  }
}

// The first tile of some rows in a split.
struct Place {
  const Rows &rows;
  int64_t split;

  int64_t first() const { return std::max(split * SPLIT, rows.begin(0) / TILE * TILE); }
};

// `next` is the split that the thread computes next, or null.
void attend_split(const Rows &rows, int64_t split, const Place *next, const uint8_t *query, Partial &partial, Scratch &scratch) {
  const Call &call = rows.call;
  const Dtype dtype = call.keys.dtype;
  const int64_t key_words = call.key_words(), width = call.value_width(), per_word = WORD_BYTES / call.element_bytes();
  const int64_t end = std::min((split + 1) * SPLIT, rows.end(rows.count - 1)), steps = TILE / per_word;
  uint8_t *keys = aligned_buffer(scratch.keys, TILE * key_words * WORD_BYTES);
  uint8_t *values = aligned_buffer(scratch.values, width * steps * WORD_BYTES);
  const Product scores{keys, VECTORS, divide_up(call.keys.channels, per_word), key_words * LANES, reinterpret_cast<const int32_t *>(query),
                       call.operand_words(key_words), nullptr, scratch.scores, TILE};
  const Product attended{values, width / LANES, steps, steps * LANES, reinterpret_cast<const int32_t *>(scratch.weights),
                         call.operand_words(steps), scratch.rescale, partial.values, width};
  TileHeight height;
  for (int64_t first = Place{rows, split}.first(); first < end; first += TILE) {
    if (first + TILE < end)
      scratch.prefetcher.plan(rows, first + TILE);
    else if (next)
      scratch.prefetcher.plan(next->rows, next->first());
    int64_t a = 0, b = rows.count;  // rows a to b - 1 attend to keys of the tile
    while (rows.end(a) <= first) ++a;
    while (rows.begin(b - 1) >= first + TILE) --b;
    gather_vectors(rows, call.keys, first, key_words, scratch);
    pack_keys(scratch.addresses, scores.num_steps, key_words, keys, scratch.prefetcher);
    if (call.multiplies_codes)
      multiply_key_codes(scores, Groups(call.keys), call.keys.format == KVFormat::int4, gather_scales(rows, call.keys, first, scratch),
                         scratch.query_sums.data(), a, b);
    else
      compute(dtype, scores, a, b, height);
    compute_weights(rows, a, b, first, partial, scratch);
    gather_vectors(rows, call.values, first, call.value_words(), scratch);
    scratch.prefetcher.step(TILE / 4);
    pack_values(scratch.addresses, dtype, width / LANES, values);
    scratch.prefetcher.step(TILE / 4);
    if (call.multiplies_codes)
      attend_codes(rows, a, b, first, attended, scratch);
    else if (rows.attend_to_all(a, b, first) || are_finite(values, dtype, width * steps * WORD_BYTES))
      compute(dtype, attended, a, b, height);
    else
      attend_row_by_row(rows, a, b, first, attended, values, scratch, height);
    scratch.prefetcher.step(TILE);
  }
}

void join(const Partial &partial, int64_t rows, int64_t width, Partial &total) {
  for (int64_t row = 0; row < rows; ++row) {
    const float highest = std::max(total.highest[row], partial.highest[row]);
    const float total_factor = exp_scalar(total.highest[row] - highest), partial_factor = exp_scalar(partial.highest[row] - highest);
    total.highest[row] = highest;
    total.sum[row] = total.sum[row] * total_factor + partial.sum[row] * partial_factor;
    float *to = total.values + row * width;
    const float *from = partial.values + row * width;
    for (int64_t i = 0; i < width; i += LANES)
      store(to + i, multiply_add(load(from + i), splat(partial_factor), multiply(load(to + i), splat(total_factor))));
  }
}

void write_out(const Rows &rows, const Partial &total, Scratch &scratch) {
  const int64_t width = rows.call.value_width(), channels = rows.call.values.channels;
  float *x = aligned_buffer(scratch.floats, width);
  const float *sinks = rows.call.sinks;
  for (int64_t row = 0; row < rows.count; ++row) {
    const float sum = sinks ? total.sum[row] + exp_scalar(sinks[rows.head(row)] - total.highest[row]) : total.sum[row];
    for (int64_t i = 0; i < width; i += LANES) store(x + i, divide(load(total.values + row * width + i), splat(sum)));
    write_floats(rows.call.out, rows.call.keys.dtype, rows.vector_index(row) * channels, channels, x);
  }
}

// --- distribution of the work ---

// All splits of some rows, or one split. The partial result of one split is stored until the end of the call.
struct WorkItem {
  Rows rows;
  int64_t split;  // -1: all
  int64_t partial_offset;  // offset of the partial result, in floats

  int64_t work() const {
    return (rows.count + 4) * (split < 0 ? rows.num_keys() : SPLIT) * (rows.call.keys.channels + rows.call.values.channels);  // 4: cost of packing
  }
};

// Returns the number of parts into which the rows of a work item are divided. It is more than one if there would be fewer
// items than threads. Only full splits count as items: with 272 keys one thread would have 256 keys and another 16.
int64_t num_row_parts(const Call &call) {
  int64_t items = 0;
  for (int64_t s = 0; s < call.num_sequences; ++s) {
    const Rows rows{call, s, 0, 0, call.num_new(s) * call.heads_per_group};
    if (rows.count == 0) continue;
    const int64_t num_splits = rows.count <= MAX_ROWS ? std::max<int64_t>(rows.num_keys() / SPLIT, 1) : 1;
    items += divide_up(rows.count, MAX_ROWS) * num_splits * call.keys.num_heads;
  }
  return divide_up(get_threads(), std::max<int64_t>(items, 1));
}

// Rows of a few tokens with a long context are split, so that a single sequence keeps all threads busy.
int64_t list_items(const Call &call, std::vector<WorkItem> &items) {
  const int64_t parts = num_row_parts(call);
  int64_t floats = 0;
  items.clear();
  for (int64_t s = 0; s < call.num_sequences; ++s) {
    const int64_t num_rows = call.num_new(s) * call.heads_per_group;
    if (num_rows == 0) continue;
    const bool in_splits = num_rows <= MAX_ROWS && Rows{call, s, 0, 0, num_rows}.num_splits() > 1;
    const int64_t height = std::max(divide_up(std::min(num_rows, MAX_ROWS), parts), FEW_ROWS);
    for (int64_t first = (num_rows - 1) / height * height; first >= 0; first -= height) {  // the longest contexts first
      const Rows rows{call, s, 0, first, std::min(num_rows - first, height)};
      for (int64_t split = rows.first_split(); split < (in_splits ? rows.end_split() : rows.first_split() + 1); ++split)
        for (int64_t group = 0; group < call.keys.num_heads; ++group) {  // innermost, because vectors of the heads are on the same pages
          items.push_back({{call, s, group, first, rows.count}, in_splits ? split : -1, floats});
          if (in_splits) floats += Partial::size(rows.count, call.value_width());
        }
    }
  }
  return floats;
}

// `next` is the item that the thread computes next, or null.
void run_item(const WorkItem &item, const WorkItem *next, float *partials, Scratch &scratch) {
  const Rows &rows = item.rows;
  const int64_t width = rows.call.value_width(), size = Partial::size(rows.count, width);
  const uint8_t *query = query_words(rows, scratch);
  const Place next_place = next ? Place{next->rows, next->split < 0 ? next->rows.first_split() : next->split} : Place{rows, 0};
  if (item.split >= 0) {
    Partial partial = Partial::empty(partials + item.partial_offset, rows.count, width);
    return attend_split(rows, item.split, next ? &next_place : nullptr, query, partial, scratch);
  }
  Partial total = Partial::empty(aligned_buffer(scratch.total, size), rows.count, width);
  for (int64_t split = rows.first_split(); split < rows.end_split(); ++split) {
    Partial partial = Partial::empty(aligned_buffer(scratch.partial, size), rows.count, width);
    const Place later{rows, split + 1};
    attend_split(rows, split, split + 1 < rows.end_split() ? &later : next ? &next_place : nullptr, query, partial, scratch);
    join(partial, rows.count, width, total);
  }
  write_out(rows, total, scratch);
}

// `item` is the first split of its rows. The next splits follow at intervals of the number of key/value heads.
void join_splits(const WorkItem *item, float *partials, Scratch &scratch) {
  const Rows &rows = item->rows;
  const int64_t width = rows.call.value_width();
  Partial total = Partial::empty(aligned_buffer(scratch.total, Partial::size(rows.count, width)), rows.count, width);
  for (int64_t i = 0; i < rows.num_splits(); ++i)
    join(Partial(partials + item[i * rows.call.keys.num_heads].partial_offset, rows.count, width), rows.count, width, total);
  write_out(rows, total, scratch);
}

}  // namespace

OPERATOR(paged_attention, (const void *query, const PagedVectors &keys, const PagedVectors &values, const int64_t *tables,
                           int64_t table_width, const int64_t *starts, const int64_t *lengths, int64_t num_sequences, int64_t num_heads,
                           float scale, float soft_cap, int64_t window, int64_t chunk, const float *slopes, const int64_t *prefixes, const float *sinks, void *out)) {
  const Call call{query,  out,         keys,          values,    tables, starts, lengths, prefixes,
                  slopes, sinks,       table_width,   num_sequences, num_heads, window, chunk, scale, soft_cap};
  thread_local Scratch scratch_of_thread;
  thread_local std::vector<WorkItem> items;
  thread_local std::vector<float> partials_buffer;
  const int64_t num_floats = list_items(call, items), num_items = items.size();
  float *partials = aligned_buffer(partials_buffer, num_floats);
  int64_t work = 0;
  for (const WorkItem &item : items) work += item.work();
  const int64_t num_chunks = std::clamp<int64_t>(work / CHUNK_WORK, 1, std::max<int64_t>(num_items, 1));
  const WorkItem *const first_item = items.data();  // of the calling thread
  parallel_for(num_chunks, [&](int64_t chunk) {
    for (int64_t i = chunk * num_items / num_chunks; i < (chunk + 1) * num_items / num_chunks; ++i)
      run_item(first_item[i], i + 1 < num_items ? first_item + i + 1 : nullptr, partials, scratch_of_thread);
  });
  if (num_floats == 0) return;
  parallel_for(num_chunks, [&](int64_t chunk) {
    for (int64_t i = chunk * num_items / num_chunks; i < (chunk + 1) * num_items / num_chunks; ++i)
      if (first_item[i].split >= 0 && first_item[i].split == first_item[i].rows.first_split())
        join_splits(first_item + i, partials, scratch_of_thread);
  });
}
