// Quantises every row to codes and scales. kernels/quantize_rows/reference.py is the specification.
#include <vector>

#include "../operator.h"
#include "../threads.h"
#include "quantize.h"

constexpr int64_t ROWS_PER_CHUNK = 16;

// x [M, K] of the dtype, codes [M, K], scales [M, G]; static_scales [M] (static_stride 1), one scale
// (static_stride 0), or null.
OPERATOR(quantize_rows, (const void *x, Dtype dtype, int8_t *codes, float *scales, bool is_float8, int64_t group_size, const float *static_scales,
                         int64_t static_stride, int64_t num_rows, int64_t num_inputs)) {
  const Quantizer quantizer{codes, scales, is_float8, group_size, static_scales, static_stride};
  const int64_t padded = divide_up(num_inputs, LANES) * LANES;
  parallel_for(divide_up(num_rows, ROWS_PER_CHUNK), [&](int64_t chunk) {
    thread_local std::vector<float> buffer;
    if (static_cast<int64_t>(buffer.size()) < padded) buffer.resize(padded);
    float *row = buffer.data();
    std::fill(row + num_inputs, row + padded, 0.0f);
    for (int64_t i = chunk * ROWS_PER_CHUNK; i < std::min((chunk + 1) * ROWS_PER_CHUNK, num_rows); ++i) {
      read_floats(x, dtype, i * num_inputs, num_inputs, row);
      quantize_row(quantizer, i, row, num_inputs);
    }
  });
}
