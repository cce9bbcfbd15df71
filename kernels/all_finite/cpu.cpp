// Finds rows without NaN and infinity. In the exponent of NaN and infinity all bits are set.
// kernels/all_finite/reference.py is the specification.
#include <algorithm>

#include "../operator.h"
#include "../rows.h"
#include "../simd.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK = 1 << 16;  // elements that justify another thread

template <class Bits> bool finite(const Bits *x, int64_t count, Bits exponent) {
  Bits has_non_finite = 0;
  for (int64_t i = 0; i < count; ++i) has_non_finite |= (x[i] & exponent) == exponent;
  return !has_non_finite;
}

}  // namespace

OPERATOR(all_finite, (const void *x, Dtype dtype, int64_t num_rows, int64_t channels, bool *out)) {
  const int64_t size = rows_of_chunk(CHUNK, channels);
  parallel_for(divide_up(num_rows, size), [&](int64_t chunk) {
    for (int64_t row = chunk * size; row < std::min((chunk + 1) * size, num_rows); ++row) {
      const auto *halves = static_cast<const uint16_t *>(x) + row * channels;
      out[row] = dtype == Dtype::float32 ? finite<uint32_t>(static_cast<const uint32_t *>(x) + row * channels, channels, 0x7f800000)
                 : dtype == Dtype::bfloat16 ? finite<uint16_t>(halves, channels, 0x7f80)
                                            : finite<uint16_t>(halves, channels, 0x7c00);
    }
  });
}
