// Selects channels of rows in a given order. kernels/take_channels/reference.py is the specification.
#include <algorithm>

#include "../simd.h"
#include "../operator.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 13;  // channels that justify another thread

template <class Number>
void take(const void *x, int64_t stride, const int64_t *order, void *out, int64_t num_rows, int64_t num_channels) {
  const int64_t size = rows_of_chunk(CHUNK_CHANNELS, num_channels);
  parallel_for(divide_up(num_rows, size), [&](int64_t chunk) {
    for (int64_t row = chunk * size; row < std::min((chunk + 1) * size, num_rows); ++row) {
      const auto *from = static_cast<const Number *>(x) + row * stride;
      auto *to = static_cast<Number *>(out) + row * num_channels;
      for (int64_t i = 0; i < num_channels; ++i) to[i] = from[order[i]];
    }
  });
}

}  // namespace

// x: rows with a stride of `stride` elements; order [I]: channels of a row; out [rows, I]. An element has `size` bytes, 2
// or 4.
OPERATOR(take_channels, (const void *x, int64_t stride, const int64_t *order, void *out, int64_t size, int64_t num_rows, int64_t num_channels)) {
  (size == 2 ? take<uint16_t> : take<uint32_t>)(x, stride, order, out, num_rows, num_channels);
}
