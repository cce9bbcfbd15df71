// x / sqrt(mean(x^2) + eps) * weight for every row of D channels, or of the sum of two rows, unquantised or as codes.
// kernels/rms_norm/reference.py is the specification.
#include <algorithm>
#include <vector>

#include "../quantize_rows/quantize.h"
#include "../elements.h"
#include "../operator.h"
#include "../aligned_buffer.h"
#include "../threads.h"
#include "normalise.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 12;  // channels that justify another thread

struct Call {
  const void *x, *residual, *weight;
  void *out, *total;
  Quantizer quantizer;
  int64_t channels;
  float eps;
  bool has_offset;
  float offset;
};

// Normalises row number `index` in two passes, bit-identical to normalise_row. row: a buffer of padded_channels(channels)
// floats.
template <Dtype DTYPE> void normalise(const Call &call, int64_t index, float *row) {
  const int64_t channels = call.channels, bytes = index * channels * ELEMENT_BYTES<DTYPE>;
  const auto of_row = [&](auto *rows) { return reinterpret_cast<decltype(rows)>(reinterpret_cast<uintptr_t>(rows) + bytes); };
  Floats sums[NORM_VECTORS] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  for (int64_t first = 0; first < channels; first += NORM_VECTORS * LANES)
    UNROLL
    for (int64_t v = 0; v < NORM_VECTORS; ++v) {
      const int64_t i = first + v * LANES;
      Floats values = load_elements<DTYPE>(of_row(call.x), i, channels);
      if (call.residual) {
        values = rounded<DTYPE>(add(values, load_elements<DTYPE>(of_row(call.residual), i, channels)));
        store_elements<DTYPE>(of_row(call.total), i, channels, values);
      }
      store(row + i, values);
      sums[v] = multiply_add(values, values, sums[v]);
    }
  const Floats inverse = splat(inverse_root(sums, channels, call.eps));
  for (int64_t i = 0; i < channels; i += LANES) {
    const Floats root = multiply(load(row + i), inverse), weight = load_elements<DTYPE>(call.weight, i, channels);
    const Floats normed = rounded<DTYPE>(call.has_offset ? multiply(root, add(weight, splat(call.offset))) : multiply(rounded<DTYPE>(root), weight));
    if (call.quantizer.codes)
      store(row + i, normed);
    else
      store_elements<DTYPE>(of_row(call.out), i, channels, normed);
  }
  if (call.quantizer.codes) quantize_row(call.quantizer, index, row, channels);
}

}  // namespace

// x, residual, weight [D], out and total [rows, D] of one dtype; codes [rows, D], scales [rows, G] as in quantize_rows.
// residual and total are null if nothing is added. If rows become codes, out is null; otherwise codes and scales are
// null. With an offset the factors are offset + weight, and the normalised row is not rounded before the product.
OPERATOR(rms_norm, (const void *x, const void *residual, const void *weight, void *out, void *total, int8_t *codes, float *scales,
                    bool is_float8, int64_t group_size, const float *static_scales, int64_t static_stride, Dtype dtype, int64_t num_rows,
                    int64_t channels, float eps, bool has_offset, float offset)) {
  const Quantizer quantizer{codes, scales, is_float8, group_size, static_scales, static_stride};
  const Call call{x, residual, weight, out, total, quantizer, channels, eps, has_offset, offset};
  const int64_t rows_per_chunk = rows_of_chunk(CHUNK_CHANNELS, channels);
  parallel_for(divide_up(num_rows, rows_per_chunk), [&](int64_t chunk) {
    thread_local std::vector<float> buffer;
    float *row = aligned_buffer(buffer, padded_channels(channels));
    for_dtype(dtype, [&]<Dtype DTYPE>() {
      for (int64_t i = chunk * rows_per_chunk; i < std::min((chunk + 1) * rows_per_chunk, num_rows); ++i) normalise<DTYPE>(call, i, row);
    });
  });
}
