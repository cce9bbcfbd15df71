// (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias for every row of D channels, unquantised or as
// codes. kernels/layer_norm/reference.py is the specification.
#include <algorithm>
#include <vector>

#include "../operator.h"
#include "../quantize_rows/quantize.h"
#include "../rms_norm/normalise.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 12;  // channels that justify another thread

// Subtracts the mean from the row. The padding stays 0.
void centre_row(float *row, int64_t channels) {
  Floats sums[NORM_VECTORS] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  for (int64_t i = 0; i < padded_channels(channels); i += NORM_VECTORS * LANES)
    for (int64_t v = 0; v < NORM_VECTORS; ++v) sums[v] = add(sums[v], load(row + i + v * LANES));
  const float mean = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / channels;
  for (int64_t c = 0; c < channels; ++c) row[c] -= mean;
}

float inverse_deviation(const float *centred, int64_t channels, float eps) {
  Floats squares[NORM_VECTORS] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  for (int64_t i = 0; i < padded_channels(channels); i += NORM_VECTORS * LANES)
    for (int64_t v = 0; v < NORM_VECTORS; ++v) {
      const Floats part = load(centred + i + v * LANES);
      squares[v] = multiply_add(part, part, squares[v]);
    }
  return inverse_root(squares, channels, eps);
}

}  // namespace

// x and out [rows, D], weight and bias [D] of one dtype; codes [rows, D], scales [rows, G] as in quantize_rows. weight
// and bias may be null. If rows become codes, out is null; otherwise codes and scales are null.
OPERATOR(layer_norm, (const void *x, const void *weight, const void *bias, void *out, int8_t *codes, float *scales, bool is_float8,
                      int64_t group_size, const float *static_scales, int64_t static_stride, Dtype dtype, int64_t num_rows, int64_t channels,
                      float eps)) {
  const Quantizer quantizer{codes, scales, is_float8, group_size, static_scales, static_stride};
  const int64_t padded = padded_channels(channels);
  const int64_t rows_per_chunk = rows_of_chunk(CHUNK_CHANNELS, channels);
  parallel_for(divide_up(num_rows, rows_per_chunk), [&](int64_t chunk) {
    thread_local std::vector<float> buffer;
    if (static_cast<int64_t>(buffer.size()) < 3 * padded) buffer.resize(3 * padded);
    float *row = buffer.data(), *factors = row + padded, *addends = factors + padded;
    std::fill(row + channels, row + padded, 0.0f);
    if (weight) read_floats(weight, dtype, 0, channels, factors);
    if (bias) read_floats(bias, dtype, 0, channels, addends);
    for (int64_t i = chunk * rows_per_chunk; i < std::min((chunk + 1) * rows_per_chunk, num_rows); ++i) {
      read_floats(x, dtype, i * channels, channels, row);
      centre_row(row, channels);
      const float inverse = inverse_deviation(row, channels, eps);
      for (int64_t c = 0; c < channels; ++c) row[c] *= inverse;
      if (weight)
        for (int64_t c = 0; c < channels; ++c) row[c] *= factors[c];
      if (bias)
        for (int64_t c = 0; c < channels; ++c) row[c] += addends[c];
      if (codes) {
        round_to(dtype, row, channels);
        quantize_row(quantizer, i, row, channels);
      } else {
        write_floats(out, dtype, i * channels, channels, row);
      }
    }
  });
}
