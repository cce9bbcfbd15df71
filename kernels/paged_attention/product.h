// Products of a few rows and packed tiles. Words are 32 bits: one float32 or two bfloat16. Each sum runs over the steps in their order.
#pragma once

#include <algorithm>

#include "../rows.h"
#include "../simd.h"

constexpr int VECTORS = 4;                         // tiles whose products are computed together
constexpr int MAX_PANEL = ACCUMULATORS / VECTORS;  // rows whose sums then fit the registers
constexpr int64_t WORD_BYTES = 4, VECTOR_BYTES = LANES * WORD_BYTES;

// out [ROWS, TILES * 16] = kept * out + x [ROWS, steps] times tiles [TILES, steps, 16]. Without kept, out is only written.
template <bool BFLOAT16, int ROWS, int TILES>
[[gnu::noinline]] void dot(const uint8_t *tiles, int64_t tile_bytes, const int32_t *x, int64_t x_stride, int64_t num_steps, const float *kept,
                           float *out, int64_t out_stride) {
  Floats sums[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t)
      sums[row][t] = kept ? multiply(load(out + row * out_stride + t * LANES), splat(kept[row])) : splat(0.0f);
  for (int64_t step = 0; step < num_steps; ++step) {
    Ints w[TILES];
    UNROLL
    for (int t = 0; t < TILES; ++t) w[t] = load(tiles + step * VECTOR_BYTES + t * tile_bytes);
    UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const Ints x_step = splat(x[row * x_stride + step]);
      UNROLL
      for (int t = 0; t < TILES; ++t)
        sums[row][t] = BFLOAT16 ? dot_bfloat16(sums[row][t], w[t], x_step) : multiply_add(as_floats(w[t]), as_floats(x_step), sums[row][t]);
    }
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) store(out + row * out_stride + t * LANES, sums[row][t]);
}

struct Product {
  const uint8_t *tiles;  // [num_tiles, num_steps, 16 words], `tile_words` from one tile to the next
  int64_t num_tiles, num_steps, tile_words;
  const int32_t *x;
  int64_t x_stride;
  const float *kept;
  float *out;
  int64_t out_stride;
};

template <bool BFLOAT16, int ROWS, int TILES> void multiply_rows(const Product &p, int64_t tile, int64_t first, int64_t count) {
  if constexpr (ROWS > 1)
    if (count < ROWS) return multiply_rows<BFLOAT16, ROWS - 1, TILES>(p, tile, first, count);
  const int64_t tile_bytes = p.tile_words * WORD_BYTES;
  dot<BFLOAT16, ROWS, TILES>(p.tiles + tile * tile_bytes, tile_bytes, p.x + first * p.x_stride, p.x_stride, p.num_steps,
                             p.kept ? p.kept + first : nullptr, p.out + first * p.out_stride + tile * LANES, p.out_stride);
}

template <bool BFLOAT16> void multiply_panels(const Product &p, int64_t first, int64_t last) {
  const int64_t height = divide_up(last - first, divide_up(last - first, MAX_PANEL));
  for (int64_t tile = 0; tile < p.num_tiles;) {
    const int64_t num_tiles = tile + VECTORS <= p.num_tiles ? VECTORS : 1;
    for (int64_t row = first; row < last; row += height) {
      const int64_t count = std::min(last - row, height);
      if (num_tiles == 1)
        multiply_rows<BFLOAT16, MAX_PANEL, 1>(p, tile, row, count);
      else
        multiply_rows<BFLOAT16, MAX_PANEL, VECTORS>(p, tile, row, count);
    }
    tile += num_tiles;
  }
}

inline void compute(Dtype dtype, const Product &product, int64_t first, int64_t last) {
  (dtype == Dtype::bfloat16 ? multiply_panels<true> : multiply_panels<false>)(product, first, last);
}
