// With AVX2, the codes of int8 and int4 caches are multiplied as 16-bit integers: twice as many products an instruction
// as floats, and no conversion of each code. Queries and weights are rounded to 15 bits, which is finer than bfloat16.
// The sums of integers are exact. AVX-512 and AMX multiply bfloat16 at the speed of 16-bit integers.
#pragma once

#include "../kv_format.h"
#include "product.h"

#if defined(__AVX512F__) || defined(HAS_TILES)
constexpr bool MULTIPLIES_CODES = false;
#else
constexpr bool MULTIPLIES_CODES = true;
#endif

constexpr float LARGEST_CODE = 16383;
constexpr int64_t MAX_CODED_CHANNELS = 1024;  // whose products of int8 and LARGEST_CODE have a sum of 31 bits

// The channels of a vector that share a scale.
struct Groups {
  int64_t count, size;

  explicit Groups(const PagedVectors &cache)
      : count(cache.format == KVFormat::int4 ? cache.scales_size / 2 : 1),
        size(cache.format == KVFormat::int4 ? 2 * cache.stored_size / count : divide_up(cache.channels, VECTOR_BYTES / 2) * VECTOR_BYTES / 2) {}
};

inline bool is_coded(const PagedVectors &keys, const PagedVectors &values) {
  const auto has_codes = [](const PagedVectors &cache) {
    const bool is_int8 = cache.format == KVFormat::int8 && !cache.has_static_scales();  // a static scale has a code for NaN
    return cache.dtype == Dtype::bfloat16 && (is_int8 || cache.format == KVFormat::int4) && cache.channels <= MAX_CODED_CHANNELS;
  };
  if (!MULTIPLIES_CODES || !has_codes(keys) || !has_codes(values)) return false;
  const Groups of_keys(keys), of_values(values);
  const int64_t key_width = divide_up(keys.channels, VECTOR_BYTES / 2) * VECTOR_BYTES / 2;
  return of_keys.size % 2 == 0 && of_keys.count * of_keys.size <= key_width && (of_values.count == 1 || of_values.size % LANES == 0);
}

// Writes the codes of a vector as 16-bit integers, padded with zeros.
inline void copy_codes(const PagedVectors &cache, int64_t index, int64_t num_words, uint8_t *words) {
  const uint8_t *stored = cache.stored + index * cache.stored_size;
  auto *codes = reinterpret_cast<int16_t *>(words);
  const bool is_int4 = cache.format == KVFormat::int4;
  const int64_t count = std::min(is_int4 ? 2 * cache.stored_size : cache.channels, 2 * num_words);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    __m256i shorts;
    if (is_int4) {
      const __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(stored + i / 2)));
      shorts = _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi32(pairs, 12)), _mm256_set1_epi32(0xf000f));
    } else {
      shorts = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(stored + i)));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(codes + i), shorts);
  }
  for (; i < count; ++i) codes[i] = is_int4 ? stored[i / 2] >> i % 2 * 4 & 15 : static_cast<int8_t>(stored[i]);
  if (count < 2 * num_words) std::memset(codes + count, 0, (2 * num_words - count) * sizeof *codes);
}

// Rounds x to 15 bits and a sign: x = code * scale. Returns the scale, which is NaN if an x is not finite. `count` is a
// multiple of 16.
inline float round_to_codes(const float *x, int64_t count, uint16_t *codes) {
  Floats top = splat(0.0f), check = splat(0.0f);
  for (int64_t i = 0; i < count; i += LANES) {
    top = larger(top, as_floats(bit_and(as_ints(load(x + i)), splat(INT32_MAX))));
    check = multiply_add(load(x + i), splat(0.0f), check);
  }
  const float highest = largest(top), inverse = highest > 0 ? LARGEST_CODE / highest : 0;
  for (int64_t i = 0; i < count; i += LANES)
    store_halves(codes + i, bit_and(round_to_ints(multiply(load(x + i), splat(inverse))), splat(0xffff)));
  return highest / LARGEST_CODE + sum(check);
}

// Calls put(row, t, x [ROWS, steps] times tiles [TILES, steps, 16]) for each register of the product.
template <int ROWS, int TILES, class Put>
inline void dot_pairs(const uint8_t *tiles, int64_t tile_bytes, const int32_t *x, int64_t x_stride, int64_t num_steps, Put &&put) {
  Ints sums[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) sums[row][t] = splat(0);
  for (int64_t step = 0; step < num_steps; ++step) {
    Ints w[TILES];
    UNROLL
    for (int t = 0; t < TILES; ++t) w[t] = load(tiles + step * VECTOR_BYTES + t * tile_bytes);
    UNROLL
    for (int row = 0; row < ROWS; ++row)
      UNROLL
      for (int t = 0; t < TILES; ++t) sums[row][t] = dot_shorts(sums[row][t], w[t], splat(x[row * x_stride + step]));
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) put(row, t, to_floats(sums[row][t]));
}

// Computes scores [rows, 64]. `scales` [groups, 1 or 2, 64]: the scales and minimums of the keys. `sums` [rows, groups]:
// of the queries' codes.
inline void multiply_key_codes(const Product &p, const Groups &groups, bool has_minimums, const float *scales, const float *sums,
                               int64_t first, int64_t last) {
  const int64_t tile_bytes = p.tile_words * WORD_BYTES, steps = groups.count == 1 ? p.num_steps : groups.size / 2;
  constexpr int64_t WIDTH = VECTORS * LANES;
  for (int64_t group = 0; group < groups.count; ++group)
    for_each_panel(p.num_tiles, first, last, [&]<int ROWS, int TILES>(int64_t row, int64_t tile) {
      const float *at = scales + group * (has_minimums ? 2 : 1) * WIDTH + tile * LANES;
      dot_pairs<ROWS, TILES>(p.tiles + tile * tile_bytes + group * steps * VECTOR_BYTES, tile_bytes, p.x + row * p.x_stride + group * steps,
                             p.x_stride, steps, [&](int r, int t, Floats products) {
                               float *out = p.out + (row + r) * p.out_stride + (tile + t) * LANES;
                               Floats score = multiply(products, load(at + t * LANES));
                               if (has_minimums)
                                 score = multiply_add(load(at + WIDTH + t * LANES), splat(sums[(row + r) * groups.count + group]), score);
                               store(out, group == 0 ? score : add(load(out), score));
                             });
    });
}

// out = rescale * out + shifts + scales * (codes of weights times codes of values), for some tiles of channels.
inline void multiply_value_codes(const Product &p, int64_t first_tile, int64_t num_tiles, const float *scales, const float *shifts,
                                 int64_t first, int64_t last) {
  const int64_t tile_bytes = p.tile_words * WORD_BYTES;
  for_each_panel(num_tiles, first, last, [&]<int ROWS, int TILES>(int64_t row, int64_t tile) {
    tile += first_tile;
    dot_pairs<ROWS, TILES>(p.tiles + tile * tile_bytes, tile_bytes, p.x + row * p.x_stride, p.x_stride, p.num_steps,
                           [&](int r, int t, Floats products) {
                             float *out = p.out + (row + r) * p.out_stride + (tile + t) * LANES;
                             const Floats before = multiply_add(load(out), splat(p.rescale[row + r]), splat(shifts[row + r]));
                             store(out, multiply_add(products, splat(scales[row + r]), before));
                           });
  });
}
