// Products of a few rows and packed tiles. A word is 32 bits: one float32 or two bfloat16. Each sum is in the order of
// steps.
#pragma once

#include <algorithm>
#include <bit>

#include "../rows.h"
#include "../simd.h"
#include "../tiles.h"

constexpr int VECTORS = 4;   // tiles whose products are computed together, at most
constexpr int MAX_PANEL = 6;  // rows whose sums for at least one tile fit into the registers
constexpr int64_t WORD_BYTES = 4, VECTOR_BYTES = LANES * WORD_BYTES;

#ifdef HAS_TILES
constexpr int64_t PAIR_WORDS = 1;
#else
constexpr int64_t PAIR_WORDS = SPLAT_PAIR_WORDS;
#endif

// out [ROWS, TILES * 16] = rescale * out + x [ROWS, steps] times tiles [TILES, steps, 16]. If rescale is null, out is
// overwritten.
template <bool BFLOAT16, int ROWS, int TILES>
[[gnu::noinline]] void dot(const uint8_t *tiles, int64_t tile_bytes, const int32_t *x, int64_t x_stride, int64_t num_steps, const float *rescale,
                           float *out, int64_t out_stride) {
  Floats sums[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t)
      sums[row][t] = rescale ? multiply(load(out + row * out_stride + t * LANES), splat(rescale[row])) : splat(0.0f);
  for (int64_t step = 0; step < num_steps; ++step) {
    Ints w[TILES];
    UNROLL
    for (int t = 0; t < TILES; ++t) w[t] = load(tiles + step * VECTOR_BYTES + t * tile_bytes);
    UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const int32_t *x_step = x + row * x_stride + step * (BFLOAT16 ? PAIR_WORDS : 1);
      UNROLL
      for (int t = 0; t < TILES; ++t)
        sums[row][t] = BFLOAT16 ? dot_bfloat16(sums[row][t], w[t], splat_pair(x_step))
                                : multiply_add(as_floats(w[t]), as_floats(splat(*x_step)), sums[row][t]);
    }
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) store(out + row * out_stride + t * LANES, sums[row][t]);
}

struct Product {
  const uint8_t *tiles;  // [num_tiles, num_steps, 16 words], with a stride of `tile_words` between tiles
  int64_t num_tiles, num_steps, tile_words;
  const int32_t *x;
  int64_t x_stride;
  const float *rescale;
  float *out;
  int64_t out_stride;
};

// Calls work<ROWS, TILES>(row, tile) for the panels of a product: ROWS rows by TILES tiles.
template <int ROWS, class Work> void for_tiles(int64_t num_tiles, int64_t row, int64_t count, Work &&work) {
  if constexpr (ROWS > 1)
    if (count < ROWS) return for_tiles<ROWS - 1>(num_tiles, row, count, work);
  constexpr int TILES = std::min<int>(std::bit_floor<unsigned>(ACCUMULATORS / ROWS), VECTORS);
  int64_t tile = 0;
  for (; tile + TILES <= num_tiles; tile += TILES) work.template operator()<ROWS, TILES>(row, tile);
  for (; tile < num_tiles; ++tile) work.template operator()<ROWS, 1>(row, tile);
}

template <class Work> void for_each_panel(int64_t num_tiles, int64_t first, int64_t last, Work &&work) {
  const int64_t height = divide_up(last - first, divide_up(last - first, MAX_PANEL));
  for (int64_t row = first; row < last; row += height) for_tiles<MAX_PANEL>(num_tiles, row, std::min(last - row, height), work);
}

template <bool BFLOAT16> void multiply_panels(const Product &p, int64_t first, int64_t last) {
  const int64_t tile_bytes = p.tile_words * WORD_BYTES;
  for_each_panel(p.num_tiles, first, last, [&]<int ROWS, int TILES>(int64_t row, int64_t tile) {
    dot<BFLOAT16, ROWS, TILES>(p.tiles + tile * tile_bytes, tile_bytes, p.x + row * p.x_stride, p.x_stride, p.num_steps,
                               p.rescale ? p.rescale + row : nullptr, p.out + row * p.out_stride + tile * LANES, p.out_stride);
  });
}

#ifdef HAS_TILES

// The current number of rows of this thread's AMX tiles. Changing it takes as long as a dozen products.
class TileHeight {
  int64_t height = 0;

public:
  ~TileHeight() {
    if (height) release_tiles();
  }
  void set(int64_t rows) {
    if (rows == height) return;
    height = rows;
    configure_tiles(shapes_of_product(rows));
  }
};

// Multiplies a tile of rows by TILES tiles of 16 columns; kernels/tiles.h defines the steps.
template <int TILES> void multiply_tiles(const Product &p, int64_t tile, int64_t row) {
  const int64_t stride = p.out_stride * WORD_BYTES, x_stride = p.x_stride * WORD_BYTES, tile_bytes = p.tile_words * WORD_BYTES;
  float *out = p.out + row * p.out_stride + tile * LANES;
  const int32_t *x = p.x + row * p.x_stride;
  const uint8_t *at = p.tiles + tile * tile_bytes;
  if (p.rescale) {
    load_tile<0>(out, stride);
    if constexpr (TILES == 4) load_tile<1>(out + LANES, stride), load_tile<2>(out + 2 * LANES, stride), load_tile<3>(out + 3 * LANES, stride);
  } else {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  }
  for (int64_t step = 0; step < p.num_steps; step += TILE_ROWS, x += LANES, at += TILE_BYTES) {
    load_tile<4>(x, x_stride);
    load_tile<5>(at, TILE_ROW_BYTES), multiply_bfloat16_tiles<0, 4, 5>();
    if constexpr (TILES == 4) {
      load_tile<6>(at + tile_bytes, TILE_ROW_BYTES), multiply_bfloat16_tiles<1, 4, 6>();
      load_tile<7>(at + 2 * tile_bytes, TILE_ROW_BYTES), multiply_bfloat16_tiles<2, 4, 7>();
      load_tile<5>(at + 3 * tile_bytes, TILE_ROW_BYTES), multiply_bfloat16_tiles<3, 4, 5>();
    }
  }
  store_tile<0>(out, stride);
  if constexpr (TILES == 4) store_tile<1>(out + LANES, stride), store_tile<2>(out + 2 * LANES, stride), store_tile<3>(out + 3 * LANES, stride);
}

inline void multiply_by_tiles(const Product &p, int64_t first, int64_t last, TileHeight &height) {
  if (p.rescale)
    for (int64_t row = first; row < last; ++row)
      for (float *at = p.out + row * p.out_stride, *end = at + p.num_tiles * LANES; at != end; at += LANES)
        store(at, multiply(load(at), splat(p.rescale[row])));
  for (int64_t row = first; row < last; row += TILE_ROWS) {
    height.set(std::min(last - row, TILE_ROWS));
    for (int64_t tile = 0; tile < p.num_tiles;) {
      const int64_t num_tiles = tile + VECTORS <= p.num_tiles ? VECTORS : 1;
      (num_tiles == 1 ? multiply_tiles<1> : multiply_tiles<VECTORS>)(p, tile, row);
      tile += num_tiles;
    }
  }
}

inline void compute(Dtype dtype, const Product &product, int64_t first, int64_t last, TileHeight &height) {
  dtype == Dtype::bfloat16 ? multiply_by_tiles(product, first, last, height) : multiply_panels<false>(product, first, last);
}

#else

struct TileHeight {};

inline void compute(Dtype dtype, const Product &product, int64_t first, int64_t last, TileHeight &) {
  (dtype == Dtype::bfloat16 ? multiply_panels<true> : multiply_panels<false>)(product, first, last);
}

#endif
