// x / sqrt(mean(x^2) + eps) * weight for every row of D channels, or of the sum of two rows; kernels/rms_norm/reference.py is the
// specification.
#include <algorithm>
#include <vector>

#include "../recording.h"
#include "../threads.h"
#include "normalise.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 12;  // worth another thread

struct Arrays {  // [rows, D], weight [D], all of one dtype
  const void *x, *residual, *weight;  // residual: null if nothing is added
  void *out, *total;
};

void normalise(const Arrays &arrays, Dtype dtype, int64_t num_rows, int64_t channels, float eps) {
  record([=] { normalise(arrays, dtype, num_rows, channels, eps); });
  const int64_t padded = room_for_norm(channels);
  const int64_t rows_per_chunk = rows_of_chunk(CHUNK_CHANNELS, channels);
  parallel_for(divide_up(num_rows, rows_per_chunk), [&](int64_t chunk) {
    thread_local std::vector<float> kept;
    if (static_cast<int64_t>(kept.size()) < 3 * padded) kept.resize(3 * padded);
    float *row = kept.data(), *factors = row + padded, *residual = factors + padded;
    std::fill(row + channels, row + padded, 0.0f);
    read_floats(arrays.weight, dtype, 0, channels, factors);
    for (int64_t i = chunk * rows_per_chunk; i < std::min((chunk + 1) * rows_per_chunk, num_rows); ++i) {
      read_floats(arrays.x, dtype, i * channels, channels, row);
      if (arrays.residual) {
        read_floats(arrays.residual, dtype, i * channels, channels, residual);
        for (int64_t c = 0; c < channels; ++c) row[c] += residual[c];
        round_to(dtype, row, channels);
        write_floats(arrays.total, dtype, i * channels, channels, row);
      }
      normalise_row(row, factors, channels, dtype, eps);
      write_floats(arrays.out, dtype, i * channels, channels, row);
    }
  });
}

}  // namespace

extern "C" void rms_norm(const void *x, const void *weight, void *out, int32_t dtype, int64_t num_rows, int64_t channels, float eps) {
  normalise({x, nullptr, weight, out, nullptr}, Dtype(dtype), num_rows, channels, eps);
}

extern "C" void add_rms_norm(const void *x, const void *residual, const void *weight, void *out, void *total, int32_t dtype,
                             int64_t num_rows, int64_t channels, float eps) {
  normalise({x, residual, weight, out, total}, Dtype(dtype), num_rows, channels, eps);
}
