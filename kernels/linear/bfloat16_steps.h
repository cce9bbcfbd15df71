// Products of bfloat16 steps: with AMX tiles, or with multiply-adds that give the same bits.
#pragma once

#include "tile_products.h"

namespace {

constexpr int64_t INPUTS_OF_STEP = 32, PAIR_BYTES = 64;  // PAIR_BYTES: a pair of inputs of 16 outputs
constexpr int64_t PAIRS_OF_QUARTER = TILE_ROWS / 4;

struct Bfloat16Unit {
  template <int C, int A, int B> static void multiply() { multiply_bfloat16_tiles<C, A, B>(); }
};

// Adds the products of `count` pairs, starting at pair `first`, to sums. Multiply-adds in the order of kernels/tiles.h.
template <int COLUMNS, class Read>
[[gnu::always_inline]] inline void add_step(const Read &read, const int32_t *x, int64_t first, int64_t count, Floats (&sums)[COLUMNS]) {
  Floats even[COLUMNS], odd[COLUMNS];
  UNROLL
  for (int t = 0; t < COLUMNS; ++t) even[t] = odd[t] = splat(0.0f);
  for (int64_t pair = 0; pair < count; pair += PAIRS_OF_QUARTER) {
    UNROLL
    for (int t = 0; t < COLUMNS; ++t) {
      Ints pairs[PAIRS_OF_QUARTER];
      read(t, (first + pair) / PAIRS_OF_QUARTER, pairs);
      UNROLL
      for (int64_t i = 0; i < PAIRS_OF_QUARTER; ++i) {
        if (pair + i >= count) break;
        const Ints x_pair = splat(x[first + pair + i]), upper_half = splat(-65536);
        even[t] = multiply_add(as_floats(shift_left<16>(x_pair)), as_floats(shift_left<16>(pairs[i])), even[t]);
        odd[t] = multiply_add(as_floats(bit_and(x_pair, upper_half)), as_floats(bit_and(pairs[i], upper_half)), odd[t]);
      }
    }
  }
  UNROLL
  for (int t = 0; t < COLUMNS; ++t) sums[t] = add(sums[t], add(even[t], odd[t]));
}

// Multiplies one row: result [COLUMNS, 16]. For one row vector instructions are a tenth faster than tiles.
// read(t, quarter, pairs) reads four pairs of tile t.
template <int COLUMNS, class Job, class Read> [[gnu::noinline]] void multiply_row(const Job &job, int64_t num_pairs, float *result, const Read &read) {
  const FlushDenormals mode;
  const auto *x = reinterpret_cast<const int32_t *>(job.panel(0));
  Floats sums[COLUMNS];
  UNROLL
  for (int t = 0; t < COLUMNS; ++t) sums[t] = splat(0.0f);
  int64_t first = 0;
  for (; first + TILE_ROWS <= num_pairs; first += TILE_ROWS) add_step<COLUMNS>(read, x, first, TILE_ROWS, sums);
  if (first < num_pairs) add_step<COLUMNS>(read, x, first, num_pairs - first, sums);
  UNROLL
  for (int t = 0; t < COLUMNS; ++t) store(result + t * LANES, sums[t]);
}

}  // namespace
