// silu(gate) * up. kernels/swiglu/reference.py is the specification. The bits of an element do not depend on its index.
#include <algorithm>

#include "../operator.h"
#include "../rows.h"
#include "../swiglu.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 13;  // channels that justify another thread
constexpr int64_t PIECE = 16 * LANES;        // channels converted to float32 at once

void compute_piece(const void *gate, const void *up, void *out, Dtype dtype, int64_t gate_first, int64_t up_first, int64_t out_first,
                   int64_t count) {
  alignas(64) float g[PIECE] = {}, u[PIECE] = {};
  read_floats(gate, dtype, gate_first, count, g);
  read_floats(up, dtype, up_first, count, u);
  swiglu(dtype, g, u, divide_up(count, LANES) * LANES);
  write_floats(out, dtype, out_first, count, g);
}

}  // namespace

// gate, up and out [rows, F] of one dtype. Strides are from row to row, in elements; out is contiguous.
OPERATOR(swiglu, (const void *gate, const void *up, void *out, Dtype dtype, int64_t num_rows, int64_t channels, int64_t gate_stride,
                  int64_t up_stride)) {
  const int64_t chunks_per_row = divide_up(channels, CHUNK_CHANNELS);
  const int64_t rows_per_chunk = rows_of_chunk(CHUNK_CHANNELS, channels);
  parallel_for(divide_up(num_rows, rows_per_chunk) * chunks_per_row, [&](int64_t chunk) {
    const int64_t first_row = chunk / chunks_per_row * rows_per_chunk, first = chunk % chunks_per_row * CHUNK_CHANNELS;
    for (int64_t row = first_row; row < std::min(first_row + rows_per_chunk, num_rows); ++row)
      for (int64_t i = first; i < std::min(first + CHUNK_CHANNELS, channels); i += PIECE)
        compute_piece(gate, up, out, dtype, row * gate_stride + i, row * up_stride + i, row * channels + i,
                      std::min(PIECE, channels - i));
  });
}
