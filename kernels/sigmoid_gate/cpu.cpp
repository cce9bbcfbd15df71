// x * sigmoid(gate). kernels/sigmoid_gate/reference.py is the specification. The bits of an element do not depend on its
// index.
#include <algorithm>

#include "../exp.h"
#include "../operator.h"
#include "../rows.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 13;  // channels that justify another thread
constexpr int64_t PIECE = 16 * LANES;        // channels converted to float32 at once

// Overwrites `gates` with their sigmoids, rounded to the dtype.
void apply_sigmoid(Dtype dtype, float (&gates)[PIECE]) {
  for (int64_t i = 0; i < PIECE; i += LANES)
    store(gates + i, divide(splat(1.0f), add(splat(1.0f), exp(subtract(splat(0.0f), load(gates + i))))));
  round_to(dtype, gates, PIECE);
}

}  // namespace

// x and out [rows, channels] and gate [rows, gate_channels] of one dtype. gate_channels is channels or 1.
OPERATOR(sigmoid_gate, (const void *x, const void *gate, void *out, Dtype dtype, int64_t num_rows, int64_t channels, int64_t gate_channels)) {
  const int64_t size = rows_of_chunk(CHUNK_CHANNELS, channels);
  parallel_for(divide_up(num_rows, size), [&](int64_t chunk) {
    alignas(64) float values[PIECE], gates[PIECE] = {};
    for (int64_t row = chunk * size; row < std::min((chunk + 1) * size, num_rows); ++row)
      for (int64_t first = 0; first < channels; first += PIECE) {
        const int64_t count = std::min(PIECE, channels - first);
        read_floats(x, dtype, row * channels + first, count, values);
        if (gate_channels == channels || first == 0) {
          read_floats(gate, dtype, row * gate_channels + first, std::min(count, gate_channels), gates);
          apply_sigmoid(dtype, gates);
        }
        for (int64_t i = 0; i < count; ++i) values[i] *= gates[gate_channels == 1 ? 0 : i];
        write_floats(out, dtype, row * channels + first, count, values);
      }
  });
}
