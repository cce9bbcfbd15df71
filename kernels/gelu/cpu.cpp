// GELU, or its approximation by tanh, times up. kernels/gelu/reference.py is the specification. The bits of an element
// do not depend on its index.
#include <algorithm>

#include "../exp.h"
#include "../operator.h"
#include "../rows.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 13;  // channels that justify another thread
constexpr int64_t PIECE = 16 * LANES;        // channels converted to float32 at once

Floats polynomial(Floats x, std::initializer_list<float> coefficients) {  // coefficients from the highest degree
  Floats sum = splat(0.0f);
  for (const float coefficient : coefficients) sum = multiply_add(sum, x, splat(coefficient));
  return sum;
}

// x P(x^2) / Q(x^2) with Eigen's coefficients. Its value at 4 differs from 1 by 1.6e-8. NaN passes through.
Floats erf(Floats x) {
  x = smaller(splat(4.0f), larger(splat(-4.0f), x));
  const Floats square = multiply(x, x);
  const Floats p = polynomial(square, {-2.72614225801306e-10f, 2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f,
                                       -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f});
  const Floats q = polynomial(square, {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f,
                                       -1.42647390514189e-02f});
  return divide(multiply(x, p), q);
}

Floats inner_of_tanh(Floats x) {
  const Floats cube = multiply(multiply(multiply(splat(0.044715f), x), x), x);
  return multiply(splat(0.7978845608f), add(x, cube));
}

Floats activate(Floats x, bool is_tanh) {
  const Floats erf_or_tanh = is_tanh ? tanh(inner_of_tanh(x)) : erf(multiply(x, splat(0.7071067812f)));
  return multiply(multiply(splat(0.5f), x), add(splat(1.0f), erf_or_tanh));
}

}  // namespace

// x, up and out [rows, F] of one dtype. Strides are from row to row, in elements; out is contiguous. up may be null.
OPERATOR(gelu, (const void *x, int64_t x_stride, const void *up, int64_t up_stride, void *out, Dtype dtype, int64_t num_rows, int64_t channels,
                bool is_tanh)) {
  const int64_t chunks_per_row = divide_up(channels, CHUNK_CHANNELS);
  const int64_t rows_per_chunk = rows_of_chunk(CHUNK_CHANNELS, channels);
  parallel_for(divide_up(num_rows, rows_per_chunk) * chunks_per_row, [&](int64_t chunk) {
    const int64_t first_row = chunk / chunks_per_row * rows_per_chunk, first = chunk % chunks_per_row * CHUNK_CHANNELS;
    for (int64_t row = first_row; row < std::min(first_row + rows_per_chunk, num_rows); ++row)
      for (int64_t c = first; c < std::min(first + CHUNK_CHANNELS, channels); c += PIECE) {
        const int64_t count = std::min(PIECE, channels - c);
        alignas(64) float piece[PIECE] = {}, factors[PIECE];
        read_floats(x, dtype, row * x_stride + c, count, piece);
        for (int64_t i = 0; i < count; i += LANES) store(piece + i, activate(load(piece + i), is_tanh));
        if (up) {
          round_to(dtype, piece, count);
          read_floats(up, dtype, row * up_stride + c, count, factors);
          for (int64_t i = 0; i < count; ++i) piece[i] *= factors[i];
        }
        write_floats(out, dtype, row * channels + c, count, piece);
      }
  });
}
