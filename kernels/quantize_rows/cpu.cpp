// Every row as int8 codes and a scale; kernels/quantize_rows/reference.py is the specification.
#include <vector>

#include "../operator.h"
#include "../threads.h"
#include "quantize.h"

constexpr int64_t ROWS_PER_CHUNK = 16;

// x [M, K] of the dtype, codes [M, K], scales [M]
OPERATOR(quantize_rows, (const void *x, Dtype dtype, int8_t *codes, float *scales, int64_t num_rows, int64_t num_inputs)) {
  const int64_t padded = divide_up(num_inputs, LANES) * LANES;
  parallel_for(divide_up(num_rows, ROWS_PER_CHUNK), [&](int64_t chunk) {
    thread_local std::vector<float> kept;
    if (static_cast<int64_t>(kept.size()) < padded) kept.resize(padded);
    float *row = kept.data();
    std::fill(row + num_inputs, row + padded, 0.0f);
    for (int64_t i = chunk * ROWS_PER_CHUNK; i < std::min((chunk + 1) * ROWS_PER_CHUNK, num_rows); ++i) {
      read_floats(x, dtype, i * num_inputs, num_inputs, row);
      scales[i] = quantize_row(row, num_inputs, codes + i * num_inputs);
    }
  });
}
