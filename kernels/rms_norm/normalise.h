// The norm of one row. Squares are summed in four registers in the order of channels, so that the bits depend only on
// the row.
#pragma once

#include <cmath>

#include "../rows.h"
#include "../simd.h"

constexpr int64_t NORM_VECTORS = 4;

// The number of floats in the buffer of a row. The floats after its channels are 0.
inline int64_t padded_channels(int64_t channels) { return divide_up(channels, NORM_VECTORS * LANES) * NORM_VECTORS * LANES; }

// 1 / sqrt(mean + eps), where mean is the mean of the squares summed in `sums`.
inline float inverse_root(const Floats (&sums)[NORM_VECTORS], int64_t channels, float eps) {
  const float mean = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / channels;
  return 1 / std::sqrt(mean + eps);
}

// row / sqrt(mean(row^2) + eps) rounded to the dtype, times weight. The product is not rounded.
inline void normalise_row(float *row, const float *weight, int64_t channels, Dtype dtype, float eps) {
  Floats sums[NORM_VECTORS] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  for (int64_t i = 0; i < padded_channels(channels); i += NORM_VECTORS * LANES)
    for (int64_t v = 0; v < NORM_VECTORS; ++v) {
      const Floats part = load(row + i + v * LANES);
      sums[v] = multiply_add(part, part, sums[v]);
    }
  const float inverse = inverse_root(sums, channels, eps);
  for (int64_t c = 0; c < channels; ++c) row[c] *= inverse;
  round_to(dtype, row, channels);
  for (int64_t c = 0; c < channels; ++c) row[c] *= weight[c];
}
