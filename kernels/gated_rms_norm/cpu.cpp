// The root mean square norm of x * silu(gate) over groups of channels, or of x, times sigmoid(gate).
// kernels/gated_rms_norm/reference.py is the specification.
#include <algorithm>
#include <vector>

#include "../aligned_buffer.h"
#include "../operator.h"
#include "../rms_norm/normalise.h"
#include "../swiglu.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 12;  // channels that justify another thread

struct Call {
  const void *x, *gate, *weight;
  void *out;
  Dtype dtype;
  int64_t channels, x_stride, gate_stride, group_size;
  float eps;
  bool gates_output;
};

// Normalises the channels from `first` of a row. gated, factors: buffers of padded_channels(group_size) floats.
void normalise(const Call &call, int64_t row, int64_t first, float *gated, float *factors) {
  const int64_t size = call.group_size, padded = padded_channels(size);
  std::fill(gated + size, gated + padded, 0.0f);
  std::fill(factors + size, factors + padded, 0.0f);
  const int64_t gate = row * call.gate_stride + first, x = row * call.x_stride + first;
  if (call.gates_output) {
    read_floats(call.x, call.dtype, x, size, gated);
    read_floats(call.weight, call.dtype, first, size, factors);
    normalise_row(gated, factors, size, Dtype::float32, call.eps);
    read_floats(call.gate, call.dtype, gate, size, factors);
    for (int64_t i = 0; i < padded; i += LANES)
      store(gated + i, divide(load(gated + i), add(splat(1.0f), exp(subtract(splat(0.0f), load(factors + i))))));
  } else {
    read_floats(call.gate, call.dtype, gate, size, gated);
    read_floats(call.x, call.dtype, x, size, factors);
    swiglu(Dtype::float32, gated, factors, padded);
    read_floats(call.weight, call.dtype, first, size, factors);
    normalise_row(gated, factors, size, call.dtype, call.eps);
  }
  write_floats(call.out, call.dtype, row * call.channels + first, size, gated);
}

}  // namespace

// x, gate and out [rows, channels], weight [channels] of one dtype. Strides are from row to row, in elements; out is
// contiguous.
OPERATOR(gated_rms_norm, (const void *x, const void *gate, const void *weight, void *out, Dtype dtype, int64_t num_rows, int64_t channels,
                          int64_t x_stride, int64_t gate_stride, int64_t group_size, float eps, bool gates_output)) {
  const Call call{x, gate, weight, out, dtype, channels, x_stride, gate_stride, group_size, eps, gates_output};
  const int64_t num_groups = channels / group_size, count = num_rows * num_groups, size = rows_of_chunk(CHUNK_CHANNELS, group_size);
  parallel_for(divide_up(count, size), [&](int64_t chunk) {
    thread_local std::vector<float> buffer;
    const int64_t padded = padded_channels(group_size);
    float *gated = aligned_buffer(buffer, 2 * padded);
    for (int64_t i = chunk * size; i < std::min((chunk + 1) * size, count); ++i)
      normalise(call, i / num_groups, i % num_groups * group_size, gated, gated + padded);
  });
}
