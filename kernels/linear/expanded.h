// Products of many rows with float weights that are expanded to float32 first, a block of inputs of a tile at a time. AVX2
// has no dot products of bfloat16: a kernel that converts for each panel of rows needs more registers than there are. A
// block and its rows stay in the caches. Sums are kept in memory between blocks, which changes no bits.
#pragma once

#include <algorithm>
#include <vector>

#include "../aligned_buffer.h"
#include "products.h"

namespace {

constexpr bool CAN_EXPAND = ACCUMULATORS < 16;
constexpr int64_t ROWS_TO_EXPAND = 24;    // the least rows; fewer were not measured
constexpr int64_t MAX_EXPANDED_ROWS = 6;  // of a panel
constexpr int64_t INPUTS_OF_BLOCK = 256;  // a block of a tile takes half of the first-level cache
constexpr int64_t EXPANDED_PANELS = 22;   // of 6 rows; a block of their inputs takes a quarter of the second-level cache
constexpr int64_t TILES_OF_EXPANSION = 8;

// Returns the number of panels of a chunk, nearly equal for all chunks.
inline int64_t panels_per_expansion(int64_t num_panels) {
  return divide_up(num_panels, divide_up(std::max<int64_t>(num_panels, 1), EXPANDED_PANELS));
}

// sums [ROWS, 16] += the products of inputs [num_inputs, ROWS] and of a tile [num_inputs, 16], in the order of inputs.
template <int ROWS> [[gnu::noinline]] void add_products(const float *x, const float *tile, int64_t num_inputs, float *sums) {
  Floats of_rows[ROWS];
  UNROLL
  for (int row = 0; row < ROWS; ++row) of_rows[row] = load(sums + row * LANES);
  for (int64_t input = 0; input < num_inputs; ++input, x += ROWS, tile += LANES) {
    const Floats w = load(tile);
    UNROLL
    for (int row = 0; row < ROWS; ++row) of_rows[row] = multiply_add(w, splat(x[row]), of_rows[row]);
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row) store(sums + row * LANES, of_rows[row]);
}

inline void add_products(int64_t num_rows, const float *x, const float *tile, int64_t num_inputs, float *sums) {
  constexpr void (*OF_ROWS[])(const float *, const float *, int64_t, float *) = {add_products<1>, add_products<2>, add_products<3>,
                                                                                 add_products<4>, add_products<5>, add_products<6>};
  OF_ROWS[num_rows - 1](x, tile, num_inputs, sums);
}

// Writes the products of `num_rows` rows from `first_row` on and the item's tiles. multiply(weight, results) computes
// results [tiles, rows, 16], which are rounded before the bias is added if `rounds`.
template <class Multiply>
void write_expanded(const Rows &rows, const Output &out, const WorkItem &item, int64_t first_row, int64_t num_rows, bool rounds,
                    Multiply &&multiply) {
  thread_local std::vector<float> memory[2];
  const int64_t num_tiles = item.last_tile - item.first_tile, size = num_rows * LANES;
  float *results[2] = {};
  for (const Weight *weight : {&out.weight, &out.up}) {
    const bool is_up = weight == &out.up;
    if (is_up && !out.up.memory) continue;  // a plain weight without inputs has no memory either
    float *to = results[is_up] = aligned_buffer(memory[is_up], num_tiles * size);
    multiply(*weight, to);
    if (!weight->bias) continue;
    if (rounds) round_to(rows.dtype, to, num_tiles * size);
    for (int64_t tile = item.first_tile; tile < item.last_tile; ++tile, to += size)
      add_bias(*weight, rows.dtype, num_rows, tile, 1, std::min(LANES, out.num_outputs - tile * LANES), to);
  }
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t number = item.first_tile + tile, count = std::min(LANES, out.num_outputs - number * LANES);
    float *const up = results[1] ? results[1] + tile * size : nullptr;
    write_rows(out, rows.dtype, first_row, num_rows, number, count, LANES, results[0] + tile * size, up);
  }
}

}  // namespace
