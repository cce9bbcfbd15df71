// The operands of attention: queries, keys and values as words, from the batch and the paged cache.
// kernels/paged_attention/cpu.cpp defines rows, tiles and splits.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../kv_format.h"
#include "../aligned_buffer.h"
#include "codes.h"
#include "product.h"

namespace {

constexpr int64_t TILE = LANES * VECTORS;  // keys
constexpr int64_t SPLIT = 4 * TILE;        // keys
constexpr int64_t MAX_ROWS = 64;
constexpr int64_t PREFETCH_STEP = 2;  // vectors

struct Call {
  const void *query;  // [T, H, D]
  void *out;          // [T, H, E]
  const PagedVectors &keys, &values;
  const int64_t *tables, *starts, *lengths, *prefixes;  // prefixes: may be null
  const float *slopes, *sinks;                          // may be null
  int64_t table_width, num_sequences, num_heads, window, chunk;  // window, chunk: 0 if none
  float scale, soft_cap;                                // soft_cap: 0 if none
  int64_t heads_per_group = num_heads / keys.num_heads;
  bool multiplies_codes = is_coded(keys, values);

  int64_t element_bytes() const { return keys.dtype == Dtype::bfloat16 ? 2 : 4; }  // of the products' operands
  int64_t key_words() const { return divide_up(keys.channels * element_bytes(), VECTOR_BYTES) * LANES; }
  int64_t value_words() const { return divide_up(values.channels * element_bytes(), VECTOR_BYTES) * LANES; }
  // Words of a query or of weights that are multiplied by this many words of keys or values.
  int64_t operand_words(int64_t words) const { return keys.dtype == Dtype::bfloat16 && !multiplies_codes ? words * PAIR_WORDS : words; }
  int64_t value_width() const { return divide_up(values.channels, LANES) * LANES; }
  int64_t num_new(int64_t s) const { return starts[s + 1] - starts[s]; }
};

// Rows `first` to first + count - 1 of one sequence and one key/value head. The number of a row is
// new token * heads_per_group + head.
struct Rows {
  const Call &call;
  int64_t sequence, group, first, count;

  int64_t token(int64_t row) const { return (first + row) / call.heads_per_group; }
  int64_t head(int64_t row) const { return group * call.heads_per_group + (first + row) % call.heads_per_group; }
  int64_t vector_index(int64_t row) const { return (call.starts[sequence] + token(row)) * call.num_heads + head(row); }
  int64_t length() const { return call.lengths[sequence]; }
  int64_t position(int64_t row) const { return length() - call.num_new(sequence) + token(row); }
  // A row attends to keys begin to end - 1. Neither bound decreases from one row to the next.
  int64_t begin(int64_t row) const {
    if (call.chunk) return position(row) / call.chunk * call.chunk;
    return call.window ? std::max<int64_t>(position(row) - call.window + 1, 0) : 0;
  }
  int64_t end(int64_t row) const {
    const int64_t prefix = call.prefixes ? std::min(call.prefixes[sequence], length()) : 0;
    return std::max(position(row) + 1, prefix);
  }
  int64_t num_keys() const { return end(count - 1) - begin(0); }  // keys that at least one of the rows attends to
  const int64_t *table() const { return call.tables + sequence * call.table_width; }
  int64_t first_split() const { return begin(0) / SPLIT; }
  int64_t end_split() const { return divide_up(end(count - 1), SPLIT); }
  int64_t num_splits() const { return end_split() - first_split(); }
  // Whether rows a to b - 1 attend to all of the sequence's keys first to first + 63.
  bool attend_to_all(int64_t a, int64_t b, int64_t first) const {
    return begin(b - 1) <= first && end(a) >= std::min(first + TILE, length());
  }
};

// Calls work(token, vector number) for the vectors of a sequence's tokens first to last - 1 in the cache, block by
// block.
template <class Work> void for_each_vector(const Rows &rows, const PagedVectors &cache, int64_t first, int64_t last, Work &&work) {
  for (int64_t token = first; token < last;) {
    const int64_t block = token / cache.block_size, end = std::min((block + 1) * cache.block_size, last);
    int64_t index = cache.index(rows.table()[block] * cache.block_size + token % cache.block_size, rows.group);
    for (; token < end; ++token, index += cache.num_heads) work(token, index);
  }
}

// Prefetches the keys and values of the tile that a thread computes next into the second-level cache. The requests are
// spread over the work on the current tile, because a core has only a few dozen outstanding reads.
class Prefetcher {
  const Call *call = nullptr;
  int64_t vectors[TILE], next = 0, count = 0;

  // Assembly, because g++ takes a function that only prefetches for one without effects, and removes its calls.
  static void prefetch(const uint8_t *at, int64_t bytes) {
    for (const uint8_t *line = at; line < at + bytes; line += 64) asm volatile("prefetcht1 %0" : : "m"(*line));
  }
  static void prefetch_vector(const PagedVectors &cache, int64_t index) {
    prefetch(cache.stored + index * cache.stored_bytes(), cache.stored_bytes());
    const int64_t bytes = cache.scales_size * (cache.format == KVFormat::int4 ? 2 : 4);
    if (bytes) prefetch(static_cast<const uint8_t *>(cache.scales) + index * bytes, bytes);
  }

public:
  // Plans the tile of keys `first` to first + 63.
  void plan(const Rows &rows, int64_t first) {
    call = &rows.call;
    next = count = 0;
    for_each_vector(rows, call->keys, first, std::min(first + TILE, rows.length()), [&](int64_t, int64_t index) { vectors[count++] = index; });
  }
  // Prefetches the next vectors of the plan.
  void step(int64_t num_vectors) {
    for (const int64_t end = std::min(next + num_vectors, count); next < end; ++next) {
      prefetch_vector(call->keys, vectors[next]);
      prefetch_vector(call->values, vectors[next]);
    }
  }
};

// Buffers of a thread, reused by later calls.
struct Scratch {
  Prefetcher prefetcher;
  std::vector<uint8_t> query, vectors, keys, values, zeros;
  std::vector<float> total, partial, floats;
  std::vector<float> scales, query_sums;  // only of codes
  alignas(64) float scores[MAX_ROWS * TILE], rescale[MAX_ROWS] = {}, sums[MAX_ROWS], query_scales[MAX_ROWS], weight_scales[MAX_ROWS], shifts[MAX_ROWS];
  alignas(64) uint8_t weights[MAX_ROWS * TILE * WORD_BYTES];
  const uint8_t *addresses[TILE];
};

// Writes `count` float32 as words of the products' dtype, padded with zeros. x is padded to whole registers.
void write_words(Dtype dtype, float *x, int64_t count, int64_t num_words, uint8_t *words) {
  const int64_t per_word = dtype == Dtype::bfloat16 ? 2 : 1;
  std::fill(x + count, x + num_words * per_word, 0.0f);
  if (dtype != Dtype::bfloat16) {
    std::memcpy(words, x, num_words * WORD_BYTES);
    return;
  }
  for (int64_t i = 0; i < num_words * per_word; i += LANES) store_bfloat16(reinterpret_cast<uint16_t *>(words) + i, load(x + i));
}

// Writes a query as codes. x is padded to whole registers.
void write_query_codes(const Groups &groups, int64_t row, float *x, int64_t num_words, uint8_t *words, Scratch &scratch) {
  auto *codes = reinterpret_cast<uint16_t *>(words);
  scratch.query_scales[row] = round_to_codes(x, 2 * num_words, codes);
  for (int64_t group = 0; group < groups.count; ++group) {
    int32_t sum = 0;
    for (int64_t i = group * groups.size; i < (group + 1) * groups.size; ++i) sum += static_cast<int16_t>(codes[i]);
    scratch.query_sums[row * groups.count + group] = static_cast<float>(sum);
  }
}

const uint8_t *query_words(const Rows &rows, Scratch &scratch) {
  const Call &call = rows.call;
  const int64_t words = call.operand_words(call.key_words()), channels = call.keys.channels;
  const Dtype dtype = PAIR_WORDS == 1 ? call.keys.dtype : Dtype::float32;
  const Groups groups(call.keys);
  uint8_t *query = aligned_buffer(scratch.query, rows.count * words * WORD_BYTES);
  float *x = aligned_buffer(scratch.floats, 2 * words);
  scratch.query_sums.resize(MAX_ROWS * groups.count);
  std::fill_n(scratch.query_scales, rows.count, 1.0f);
  for (int64_t row = 0; row < rows.count; ++row) {
    uint8_t *at = query + row * words * WORD_BYTES;
    read_floats(call.query, call.keys.dtype, rows.vector_index(row) * channels, channels, x);
    if (call.multiplies_codes) {
      std::fill(x + channels, x + 2 * words, 0.0f);
      write_query_codes(groups, row, x, words, at, scratch);
    } else {
      write_words(dtype, x, channels, words, at);
    }
  }
  return query;
}

// Reads the scales and, of int4, the minimums of the vectors of a tile: [groups, 1 or 2, 64].
const float *gather_scales(const Rows &rows, const PagedVectors &cache, int64_t first, Scratch &scratch) {
  const int64_t last = std::min(first + TILE, rows.length()), count = cache.scales_size;
  float *scales = aligned_buffer(scratch.scales, count * TILE);
  if (last - first < TILE) std::fill_n(scales, count * TILE, 0.0f);
  for_each_vector(rows, cache, first, last, [&](int64_t token, int64_t index) {
    if (cache.format != KVFormat::int4)
      scales[token - first] = static_cast<const float *>(cache.scales)[index];
    else
      for (int64_t i = 0; i < count; ++i) scales[i * TILE + token - first] = _cvtsh_ss(static_cast<const uint16_t *>(cache.scales)[index * count + i]);
  });
  return scales;
}

// Writes vector number `index` of the cache as words, padded with zeros. x is a buffer for the words as floats and for
// the floats that read_vector writes.
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

// Sets scratch.addresses to the addresses of the vectors of keys first to first + 63: in the cache if it stores words,
// else in copies. Bytes that are read past a vector in the cache enter no product. Vectors after the sequence's end are
// zeros.
void gather_vectors(const Rows &rows, const PagedVectors &cache, int64_t first, int64_t words, Scratch &scratch) {
  const int64_t last = std::min(first + TILE, rows.length()), bytes = words * WORD_BYTES, stored_bytes = cache.stored_bytes();
  const int64_t vector_bytes = cache.channels * (cache.dtype == Dtype::bfloat16 ? 2 : 4);
  const bool readable = vector_bytes % VECTOR_BYTES == 0 || (vector_bytes % WORD_BYTES == 0 && cache.has_margin);
  const bool in_place = cache.format == KVFormat::unquantised && cache.dtype != Dtype::float16 && readable;
  uint8_t *copies = aligned_buffer(scratch.vectors, (TILE + 1) * bytes);
  if (last - first < TILE) std::memset(copies + TILE * bytes, 0, bytes);
  std::fill(scratch.addresses + (last - first), scratch.addresses + TILE, copies + TILE * bytes);
  if (in_place)
    return for_each_vector(rows, cache, first, last,
                           [&](int64_t token, int64_t index) { scratch.addresses[token - first] = cache.stored + index * stored_bytes; });
  float *x = aligned_buffer(scratch.floats, std::max(2 * words, decoded_size(cache)));
  for_each_vector(rows, cache, first, last, [&](int64_t token, int64_t index) {
    uint8_t *copy = copies + (token - first) * bytes;
    if (token % 8 == 0) scratch.prefetcher.step(1);
    if (rows.call.multiplies_codes)
      copy_codes(cache, index, words, copy);
    else
      copy_words(cache, index, rows.group, words, x, copy);
    scratch.addresses[token - first] = copy;
  });
}

// Packs keys as [64 / 16, words, 16 keys]. Words from `num_words` on are after the end of the vectors; they are 0.
void pack_keys(const uint8_t *const *at, int64_t num_words, int64_t words, uint8_t *tiles, Prefetcher &prefetcher) {
  for (int64_t tile = 0; tile < VECTORS; ++tile)
    for (int64_t word = 0; word < words; word += LANES) {
      prefetcher.step(PREFETCH_STEP);
      Ints block[LANES];
      UNROLL
      for (int64_t i = 0; i < LANES; ++i) block[i] = load(at[tile * LANES + i] + word * WORD_BYTES);
      transpose(block);
      UNROLL
      for (int64_t i = 0; i < LANES; ++i) store(tiles + (tile * words + word + i) * VECTOR_BYTES, word + i < num_words ? block[i] : splat(0));
    }
}

// Packs values as [E / 16, 64 float32 or 32 pairs of bfloat16, 16 channels].
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
      store(tiles + (tile * TILE + key) / 2 * VECTOR_BYTES, interleave_halves(even, odd));
    }
}

// Whether no packed value is NaN or infinite. The sum of the products of all values with 0 is then 0, else NaN.
bool are_finite(const uint8_t *tiles, Dtype dtype, int64_t num_bytes) {
  Floats totals[VECTORS] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  for (int64_t byte = 0; byte < num_bytes; byte += VECTORS * VECTOR_BYTES)
    UNROLL
    for (int64_t v = 0; v < VECTORS; ++v) {
      const Ints words = load(tiles + byte + v * VECTOR_BYTES);
      totals[v] = dtype == Dtype::bfloat16 ? dot_bfloat16(totals[v], words, splat(0)) : multiply_add(as_floats(words), splat(0.0f), totals[v]);
    }
  return sum(add(add(totals[0], totals[1]), add(totals[2], totals[3]))) == 0;
}

}  // namespace
