// Causal attention over the paged cache; kernels/paged_attention/reference.py is the specification.
//
// A row is one query head of one new token; D channels per key, E per value. Rows of one sequence and one key/value head share the keys and
// values that they read. Words are 32 bits: one float32 or two bfloat16, in which the products are computed.
//
// A row's bits depend on its token's position alone, not on other rows, steps, chunks or threads: keys are taken in tiles counted from the
// sequence's beginning, and tiles in splits. Each split is summed on its own by online softmax (arXiv 1805.02867), tile after tile, and
// splits are joined in their order. A tile or split of which a row sees nothing changes no bit of it.
#include <algorithm>
#include <limits>
#include <vector>

#include "../exp.h"
#include "../kv_format.h"
#include "../operator.h"
#include "../room.h"
#include "../threads.h"
#include "product.h"

namespace {

constexpr int64_t TILE = LANES * VECTORS;  // keys
constexpr int64_t SPLIT = 4 * TILE;        // keys
constexpr int64_t MAX_ROWS = 64;
constexpr int64_t FEW_ROWS = 8;            // whose products take as long as packing what they read
constexpr int64_t CHUNK_WORK = 1 << 15;    // multiplications that are worth another thread: a microsecond, five times a hand-over
constexpr float LOWEST = std::numeric_limits<float>::lowest(), INFINITE = std::numeric_limits<float>::infinity();

struct Call {
  const void *query;  // [T, H, D]
  void *out;          // [T, H, E]
  const PagedVectors &keys, &values;
  const int64_t *tables, *starts, *lengths, *prefixes;  // prefixes: null if there are none
  const float *slopes;                                  // null if there are none
  int64_t table_width, num_sequences, num_heads, window;  // window: 0 if there is none
  float scale, soft_cap;                                // soft_cap: 0 if there is none
  int64_t heads_per_group = num_heads / keys.num_heads;

  int64_t element_bytes() const { return keys.dtype == Dtype::bfloat16 ? 2 : 4; }  // of what is multiplied
  int64_t key_words() const { return divide_up(keys.channels * element_bytes(), VECTOR_BYTES) * LANES; }
  int64_t value_words() const { return divide_up(values.channels * element_bytes(), VECTOR_BYTES) * LANES; }
  int64_t value_width() const { return divide_up(values.channels, LANES) * LANES; }
  int64_t num_new(int64_t s) const { return starts[s + 1] - starts[s]; }
};

// Some rows of one sequence and key/value head; row = new token * heads_per_group + head.
struct Rows {
  const Call &call;
  int64_t sequence, group, first, count;

  int64_t token(int64_t row) const { return (first + row) / call.heads_per_group; }
  int64_t head(int64_t row) const { return group * call.heads_per_group + (first + row) % call.heads_per_group; }
  int64_t place(int64_t row) const { return (call.starts[sequence] + token(row)) * call.num_heads + head(row); }
  int64_t length() const { return call.lengths[sequence]; }
  int64_t position(int64_t row) const { return length() - call.num_new(sequence) + token(row); }
  // A row sees the keys begin .. end - 1; neither falls from one row to the next.
  int64_t begin(int64_t row) const { return call.window ? std::max<int64_t>(position(row) - call.window + 1, 0) : 0; }
  int64_t end(int64_t row) const {
    const int64_t prefix = call.prefixes ? std::min(call.prefixes[sequence], length()) : 0;
    return std::max(position(row) + 1, prefix);
  }
  const int64_t *table() const { return call.tables + sequence * call.table_width; }
  int64_t first_split() const { return begin(0) / SPLIT; }
  int64_t end_split() const { return divide_up(end(count - 1), SPLIT); }
  int64_t num_splits() const { return end_split() - first_split(); }
};

// Softmax over some keys, not yet divided: the highest score, the sum of exp(score - highest), and the values weighted by these.
struct Partial {
  float *highest, *sum;  // [rows]
  float *values;         // [rows, E padded]

  static int64_t size(int64_t rows, int64_t width) { return rows * (2 + width); }
  Partial(float *at, int64_t rows, int64_t width) : highest(at + rows * width), sum(highest + rows), values(at) {}
  static Partial of_nothing(float *at, int64_t rows, int64_t width) {
    std::fill_n(at, rows * width, 0.0f);
    std::fill_n(at + rows * width, rows, LOWEST);
    std::fill_n(at + rows * width + rows, rows, 0.0f);
    return {at, rows, width};
  }
};

// What a thread needs besides. Kept from call to call.
struct Scratch {
  std::vector<uint8_t> query, vectors, keys, values;
  std::vector<float> total, partial, floats;
  alignas(64) float scores[MAX_ROWS * TILE], kept[MAX_ROWS] = {}, sums[MAX_ROWS];
  alignas(64) uint8_t weights[MAX_ROWS * TILE * WORD_BYTES];
  const uint8_t *at[TILE];
};

// --- what is multiplied ---

// `count` float32 as words of the dtype of the products, and zeros after them. x is padded to whole vectors.
void write_words(Dtype dtype, float *x, int64_t count, int64_t num_words, uint8_t *words) {
  const int64_t per_word = dtype == Dtype::bfloat16 ? 2 : 1;
  std::fill(x + count, x + num_words * per_word, 0.0f);
  if (dtype != Dtype::bfloat16) {
    std::memcpy(words, x, num_words * WORD_BYTES);
    return;
  }
  for (int64_t i = 0; i < num_words * per_word; i += LANES) store_bfloat16(reinterpret_cast<uint16_t *>(words) + i, load(x + i));
}

const uint8_t *query_words(const Rows &rows, Scratch &scratch) {
  const Call &call = rows.call;
  const int64_t words = call.key_words(), channels = call.keys.channels;
  uint8_t *query = room(scratch.query, rows.count * words * WORD_BYTES);
  float *x = room(scratch.floats, 2 * words);
  for (int64_t row = 0; row < rows.count; ++row) {
    read_floats(call.query, call.keys.dtype, rows.place(row) * channels, channels, x);
    write_words(call.keys.dtype, x, channels, words, query + row * words * WORD_BYTES);
  }
  return query;
}

// Vector number `index` of the cache as words, and zeros after them. x has room for them, and for all that read_vector writes.
void copy_words(const PagedVectors &cache, int64_t index, int64_t head, int64_t num_words, float *x, uint8_t *words) {
  const int64_t channels = cache.channels;
  const bool is_half = cache.dtype == Dtype::bfloat16, is_plain = cache.format == KVFormat::unquantised;
  if (cache.format == KVFormat::int4 || (is_plain && is_half)) {
    read_vector(cache, index, head, x);
    write_words(cache.dtype, x, channels, num_words, words);
  } else if (is_half) {
    auto *halves = reinterpret_cast<uint16_t *>(words);
    read_codes(cache, index, head, [&](int64_t i, Floats numbers) { store_bfloat16(halves + i, numbers); });
    for (int64_t i = channels; i < 2 * num_words; ++i) halves[i] = 0;
  } else {
    auto *floats = reinterpret_cast<float *>(words);
    if (is_plain)
      read_floats(cache.stored + index * cache.stored_bytes(), cache.dtype, 0, channels, floats);
    else
      read_codes(cache, index, head, [&](int64_t i, Floats numbers) { store(floats + i, numbers); });
    for (int64_t i = channels; i < num_words; ++i) floats[i] = 0;
  }
}

// The vectors of a sequence's tokens first .. last - 1 in the cache: work(token, number of the vector) for each, block by block.
template <class Work> void for_each_vector(const Rows &rows, const PagedVectors &cache, int64_t first, int64_t last, Work &&work) {
  for (int64_t token = first; token < last;) {
    const int64_t block = token / cache.block_size, end = std::min((block + 1) * cache.block_size, last);
    int64_t index = cache.index(rows.table()[block] * cache.block_size + token % cache.block_size, rows.group);
    for (; token < end; ++token, index += cache.num_heads) work(token, index);
  }
}

// scratch.at: where the vectors of the keys first .. first + 63 lie, in the cache itself where it holds words; what is read past a vector
// there is in no product. Those after the sequence's end are zeros. Fetches those of the next tile (decode over 4,096 tokens of 128
// channels: 1.15 to 1.28 times as fast).
void find_vectors(const Rows &rows, const PagedVectors &cache, int64_t first, int64_t words, Scratch &scratch) {
  const int64_t last = std::min(first + TILE, rows.length()), bytes = words * WORD_BYTES, stored_bytes = cache.stored_bytes();
  const int64_t vector_bytes = cache.channels * (cache.dtype == Dtype::bfloat16 ? 2 : 4);
  const bool readable = vector_bytes % VECTOR_BYTES == 0 || (vector_bytes % WORD_BYTES == 0 && cache.has_margin);
  const bool in_place = cache.format == KVFormat::unquantised && cache.dtype != Dtype::float16 && readable;
  uint8_t *copies = room(scratch.vectors, (TILE + 1) * bytes);
  for_each_vector(rows, cache, last, std::min(last + TILE, rows.length()), [&](int64_t, int64_t later) {
    const auto *at = reinterpret_cast<const char *>(cache.stored + later * stored_bytes);
    for (int64_t byte = 0; byte < stored_bytes; byte += 64) _mm_prefetch(at + byte, _MM_HINT_T0);
  });
  if (last - first < TILE) std::memset(copies + TILE * bytes, 0, bytes);
  std::fill(scratch.at + (last - first), scratch.at + TILE, copies + TILE * bytes);
  if (in_place)
    return for_each_vector(rows, cache, first, last, [&](int64_t token, int64_t index) { scratch.at[token - first] = cache.stored + index * stored_bytes; });
  float *x = room(scratch.floats, std::max(2 * words, room_for(cache)));
  for_each_vector(rows, cache, first, last, [&](int64_t token, int64_t index) {
    uint8_t *copy = copies + (token - first) * bytes;
    copy_words(cache, index, rows.group, words, x, copy);
    scratch.at[token - first] = copy;
  });
}

// Keys as [64 / 16, words, 16 keys]; zeros from `num_words` on, where the vectors end.
void pack_keys(const uint8_t *const *at, int64_t num_words, int64_t words, uint8_t *tiles) {
  for (int64_t tile = 0; tile < VECTORS; ++tile)
    for (int64_t word = 0; word < words; word += LANES) {
      Ints block[LANES];
      UNROLL
      for (int64_t i = 0; i < LANES; ++i) block[i] = load(at[tile * LANES + i] + word * WORD_BYTES);
      transpose(block);
      UNROLL
      for (int64_t i = 0; i < LANES; ++i) store(tiles + (tile * words + word + i) * VECTOR_BYTES, word + i < num_words ? block[i] : splat(0));
    }
}

// Values as [E / 16, 64 float32 or 32 pairs of bfloat16, 16 channels].
void pack_values(const uint8_t *const *at, Dtype dtype, int64_t num_tiles, uint8_t *tiles) {
  if (dtype != Dtype::bfloat16) {
    for (int64_t tile = 0; tile < num_tiles; ++tile)
      for (int64_t key = 0; key < TILE; ++key) store(tiles + (tile * TILE + key) * VECTOR_BYTES, load(at[key] + tile * VECTOR_BYTES));
    return;
  }
  for (int64_t tile = 0; tile < num_tiles; ++tile)
    for (int64_t key = 0; key < TILE; key += 2) {
      const auto *even = reinterpret_cast<const uint16_t *>(at[key]) + tile * LANES;
      const auto *odd = reinterpret_cast<const uint16_t *>(at[key + 1]) + tile * LANES;
      store(tiles + (tile * TILE + key) / 2 * VECTOR_BYTES, add(load_halves(even), shift_left<16>(load_halves(odd))));
    }
}

// --- softmax ---

Floats lane_numbers() {
  alignas(64) static constexpr float NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(NUMBERS);
}

// Turns the row's scores of the keys first .. first + 63 into weights. scratch.sums: theirs; scratch.kept: by how much the highest rose.
void weigh(const Rows &rows, int64_t row, int64_t first, Partial &partial, Scratch &scratch) {
  const Call &call = rows.call;
  float *scores = scratch.scores + row * TILE;
  Floats x[VECTORS];
  for (int64_t i = 0; i < VECTORS; ++i) {
    x[i] = multiply(load(scores + i * LANES), splat(call.scale));
    if (call.soft_cap != 0) x[i] = multiply(splat(call.soft_cap), tanh(divide(x[i], splat(call.soft_cap))));
    if (call.slopes) {
      const Floats distance = add(lane_numbers(), splat(static_cast<float>(first + i * LANES - rows.position(row))));
      x[i] = add(x[i], multiply(splat(call.slopes[rows.head(row)]), distance));
    }
  }
  const int64_t begin = std::max<int64_t>(rows.begin(row) - first, 0), end = std::min(rows.end(row) - first, TILE);
  if (begin > 0 || end < TILE) {
    for (int64_t i = 0; i < VECTORS; ++i) store(scores + i * LANES, x[i]);
    std::fill(scores, scores + begin, -INFINITE);
    std::fill(scores + end, scores + TILE, -INFINITE);
    for (int64_t i = 0; i < VECTORS; ++i) x[i] = load(scores + i * LANES);
  }
  Floats top = x[0];
  for (int64_t i = 1; i < VECTORS; ++i) top = larger(top, x[i]);
  const float before = partial.highest[row], highest = std::max(before, largest(top));
  Floats total = splat(0.0f);
  for (int64_t i = 0; i < VECTORS; ++i) {
    const Floats weight = exp(subtract(x[i], splat(highest)));
    total = add(total, weight);
    if (call.keys.dtype == Dtype::bfloat16)
      store_bfloat16(reinterpret_cast<uint16_t *>(scratch.weights) + row * TILE + i * LANES, weight);
    else
      store(reinterpret_cast<float *>(scratch.weights) + row * TILE + i * LANES, weight);
  }
  scratch.kept[row] = before - highest;
  scratch.sums[row] = sum(total);
  partial.highest[row] = highest;
}

void weigh_rows(const Rows &rows, int64_t first_row, int64_t last_row, int64_t first, Partial &partial, Scratch &scratch) {
  for (int64_t row = first_row; row < last_row; ++row) weigh(rows, row, first, partial, scratch);
  for (int64_t row = first_row / LANES * LANES; row < last_row; row += LANES) store(scratch.kept + row, exp(load(scratch.kept + row)));
  for (int64_t row = first_row; row < last_row; ++row) partial.sum[row] = partial.sum[row] * scratch.kept[row] + scratch.sums[row];
}

void attend_split(const Rows &rows, int64_t split, const uint8_t *query, Partial &partial, Scratch &scratch) {
  const Call &call = rows.call;
  const Dtype dtype = call.keys.dtype;
  const int64_t key_words = call.key_words(), width = call.value_width(), per_word = WORD_BYTES / call.element_bytes();
  const int64_t end = std::min((split + 1) * SPLIT, rows.end(rows.count - 1)), steps = TILE / per_word;
  uint8_t *keys = room(scratch.keys, TILE * key_words * WORD_BYTES);
  uint8_t *values = room(scratch.values, width * steps * WORD_BYTES);
  const Product scores{keys, VECTORS, divide_up(call.keys.channels, per_word), key_words * LANES, reinterpret_cast<const int32_t *>(query),
                       key_words, nullptr, scratch.scores, TILE};
  const Product attended{values, width / LANES, steps, steps * LANES, reinterpret_cast<const int32_t *>(scratch.weights), steps,
                         scratch.kept, partial.values, width};
  TileHeight height;
  for (int64_t first = std::max(split * SPLIT, rows.begin(0) / TILE * TILE); first < end; first += TILE) {
    int64_t a = 0, b = rows.count;  // the rows that see some of the tile
    while (rows.end(a) <= first) ++a;
    while (rows.begin(b - 1) >= first + TILE) --b;
    find_vectors(rows, call.keys, first, key_words, scratch);
    pack_keys(scratch.at, scores.num_steps, key_words, keys);
    compute(dtype, scores, a, b, height);
    weigh_rows(rows, a, b, first, partial, scratch);
    find_vectors(rows, call.values, first, call.value_words(), scratch);
    pack_values(scratch.at, dtype, width / LANES, values);
    compute(dtype, attended, a, b, height);
  }
}

void join(const Partial &partial, int64_t rows, int64_t width, Partial &total) {
  for (int64_t row = 0; row < rows; ++row) {
    const float highest = std::max(total.highest[row], partial.highest[row]);
    const float kept = exp_scalar(total.highest[row] - highest), share = exp_scalar(partial.highest[row] - highest);
    total.highest[row] = highest;
    total.sum[row] = total.sum[row] * kept + partial.sum[row] * share;
    float *to = total.values + row * width;
    const float *from = partial.values + row * width;
    for (int64_t i = 0; i < width; i += LANES)
      store(to + i, multiply_add(load(from + i), splat(share), multiply(load(to + i), splat(kept))));
  }
}

void write_out(const Rows &rows, const Partial &total, Scratch &scratch) {
  const int64_t width = rows.call.value_width(), channels = rows.call.values.channels;
  float *x = room(scratch.floats, width);
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t i = 0; i < width; i += LANES) store(x + i, divide(load(total.values + row * width + i), splat(total.sum[row])));
    write_floats(rows.call.out, rows.call.keys.dtype, rows.place(row) * channels, channels, x);
  }
}

// --- sharing the work ---

// All splits of some rows; or one of them, whose partial result goes to memory of the call.
struct Unit {
  Rows rows;
  int64_t split;  // -1: all
  int64_t place;  // of the partial result, in floats

  int64_t work() const {
    const int64_t num_keys = split < 0 ? rows.end(rows.count - 1) - rows.begin(0) : SPLIT;
    return (rows.count + 4) * num_keys * (rows.call.keys.channels + rows.call.values.channels);  // 4: for packing
  }
};

// Returns into how many parts the rows of a unit are divided: into more than one where there would be fewer units than threads.
int64_t parts_of_rows(const Call &call) {
  int64_t units = 0;
  for (int64_t s = 0; s < call.num_sequences; ++s) units += divide_up(call.num_new(s) * call.heads_per_group, MAX_ROWS) * call.keys.num_heads;
  return divide_up(get_threads(), std::max<int64_t>(units, 1));
}

// Rows of few tokens over a long context are split, so that one sequence alone keeps all threads busy.
int64_t list_units(const Call &call, std::vector<Unit> &units) {
  const int64_t parts = parts_of_rows(call);
  int64_t floats = 0;
  units.clear();
  for (int64_t s = 0; s < call.num_sequences; ++s) {
    const int64_t num_rows = call.num_new(s) * call.heads_per_group;
    if (num_rows == 0) continue;
    const bool in_splits = num_rows <= MAX_ROWS && Rows{call, s, 0, 0, num_rows}.num_splits() > 1;
    const int64_t height = in_splits ? MAX_ROWS : std::max(divide_up(std::min(num_rows, MAX_ROWS), parts), FEW_ROWS);
    for (int64_t first = (num_rows - 1) / height * height; first >= 0; first -= height) {  // the longest contexts first
      const Rows rows{call, s, 0, first, std::min(num_rows - first, height)};
      for (int64_t split = rows.first_split(); split < (in_splits ? rows.end_split() : rows.first_split() + 1); ++split)
        for (int64_t group = 0; group < call.keys.num_heads; ++group) {  // innermost: their vectors share pages
          units.push_back({{call, s, group, first, rows.count}, in_splits ? split : -1, floats});
          if (in_splits) floats += Partial::size(rows.count, call.value_width());
        }
    }
  }
  return floats;
}

void run_unit(const Unit &unit, float *partials, Scratch &scratch) {
  const Rows &rows = unit.rows;
  const int64_t width = rows.call.value_width(), size = Partial::size(rows.count, width);
  const uint8_t *query = query_words(rows, scratch);
  if (unit.split >= 0) {
    Partial partial = Partial::of_nothing(partials + unit.place, rows.count, width);
    return attend_split(rows, unit.split, query, partial, scratch);
  }
  Partial total = Partial::of_nothing(room(scratch.total, size), rows.count, width);
  for (int64_t split = rows.first_split(); split < rows.end_split(); ++split) {
    Partial partial = Partial::of_nothing(room(scratch.partial, size), rows.count, width);
    attend_split(rows, split, query, partial, scratch);
    join(partial, rows.count, width, total);
  }
  write_out(rows, total, scratch);
}

// `unit` is the first split of its rows; the others follow it, each after the same split of the other groups.
void join_splits(const Unit *unit, float *partials, Scratch &scratch) {
  const Rows &rows = unit->rows;
  const int64_t width = rows.call.value_width();
  Partial total = Partial::of_nothing(room(scratch.total, Partial::size(rows.count, width)), rows.count, width);
  for (int64_t i = 0; i < rows.num_splits(); ++i)
    join(Partial(partials + unit[i * rows.call.keys.num_heads].place, rows.count, width), rows.count, width, total);
  write_out(rows, total, scratch);
}

}  // namespace

OPERATOR(paged_attention, (const void *query, const PagedVectors &keys, const PagedVectors &values, const int64_t *tables,
                           int64_t table_width, const int64_t *starts, const int64_t *lengths, int64_t num_sequences, int64_t num_heads,
                           float scale, float soft_cap, int64_t window, const float *slopes, const int64_t *prefixes, void *out)) {
  const Call call{query,  out,         keys,          values,    tables, starts, lengths, prefixes,
                  slopes, table_width, num_sequences, num_heads, window, scale,  soft_cap};
  thread_local Scratch scratch_of_thread;
  thread_local std::vector<Unit> units;
  thread_local std::vector<float> kept_partials;
  const int64_t num_floats = list_units(call, units), num_units = units.size();
  float *partials = room(kept_partials, num_floats);
  int64_t work = 0;
  for (const Unit &unit : units) work += unit.work();
  const int64_t num_chunks = std::clamp<int64_t>(work / CHUNK_WORK, 1, std::max<int64_t>(num_units, 1));
  const Unit *const all = units.data();  // the calling thread's
  parallel_for(num_chunks, [&](int64_t chunk) {
    for (int64_t i = chunk * num_units / num_chunks; i < (chunk + 1) * num_units / num_chunks; ++i)
      run_unit(all[i], partials, scratch_of_thread);
  });
  if (num_floats == 0) return;
  parallel_for(num_chunks, [&](int64_t chunk) {
    for (int64_t i = chunk * num_units / num_chunks; i < (chunk + 1) * num_units / num_chunks; ++i)
      if (all[i].split >= 0 && all[i].split == all[i].rows.first_split()) join_splits(all + i, partials, scratch_of_thread);
  });
}
