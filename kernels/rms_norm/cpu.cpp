// x / sqrt(mean(x^2) + eps) * weight for every row of D channels, or of the sum of two rows, as numbers or as codes;
// kernels/rms_norm/reference.py is the specification.
#include <algorithm>
#include <vector>

#include "../quantize_rows/quantize.h"
#include "../operator.h"
#include "../threads.h"
#include "normalise.h"

constexpr int64_t CHUNK_CHANNELS = 1 << 12;  // worth another thread

// x, residual, weight [D], out and total [rows, D] of one dtype; codes [rows, D], scales [rows, G] as of quantize_rows. Null: residual and total if
// nothing is added; out if rows become codes, else codes and scales.
OPERATOR(rms_norm, (const void *x, const void *residual, const void *weight, void *out, void *total, int8_t *codes, float *scales,
                    bool is_float8, int64_t group_size, const float *chosen, int64_t chosen_stride, Dtype dtype, int64_t num_rows,
                    int64_t channels, float eps)) {
  const Quantizer to{codes, scales, is_float8, group_size, chosen, chosen_stride};
  const int64_t padded = room_for_norm(channels);
  const int64_t rows_per_chunk = rows_of_chunk(CHUNK_CHANNELS, channels);
  parallel_for(divide_up(num_rows, rows_per_chunk), [&](int64_t chunk) {
    thread_local std::vector<float> kept;
    if (static_cast<int64_t>(kept.size()) < 3 * padded) kept.resize(3 * padded);
    float *row = kept.data(), *factors = row + padded, *addend = factors + padded;
    std::fill(row + channels, row + padded, 0.0f);
    read_floats(weight, dtype, 0, channels, factors);
    for (int64_t i = chunk * rows_per_chunk; i < std::min((chunk + 1) * rows_per_chunk, num_rows); ++i) {
      read_floats(x, dtype, i * channels, channels, row);
      if (residual) {
        read_floats(residual, dtype, i * channels, channels, addend);
        for (int64_t c = 0; c < channels; ++c) row[c] += addend[c];
        round_to(dtype, row, channels);
        write_floats(total, dtype, i * channels, channels, row);
      }
      normalise_row(row, factors, channels, dtype, eps);
      if (codes) {
        round_to(dtype, row, channels);
        quantize_row(to, i, row, channels);
      } else {
        write_floats(out, dtype, i * channels, channels, row);
      }
    }
  });
}
