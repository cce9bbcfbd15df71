// Whether no number is NaN or infinite, whose exponents have all bits set; kernels/all_finite/reference.py is the specification.
#include <algorithm>
#include <atomic>

#include "../recording.h"
#include "../rows.h"
#include "../simd.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK = 1 << 16;  // numbers that are worth another thread

template <class Bits> bool finite(const Bits *x, int64_t count, Bits exponent) {
  Bits found = 0;
  for (int64_t i = 0; i < count; ++i) found |= (x[i] & exponent) == exponent;
  return !found;
}

}  // namespace

extern "C" void all_finite(const void *x, int32_t dtype, int64_t count, bool *out) {
  record([=] { all_finite(x, dtype, count, out); });
  std::atomic<bool> all = true;
  parallel_for(divide_up(count, CHUNK), [&](int64_t chunk) {
    const int64_t first = chunk * CHUNK, size = std::min(CHUNK, count - first);
    const auto *halves = static_cast<const uint16_t *>(x) + first;
    const bool good = Dtype(dtype) == Dtype::float32 ? finite<uint32_t>(static_cast<const uint32_t *>(x) + first, size, 0x7f800000)
                      : Dtype(dtype) == Dtype::bfloat16 ? finite<uint16_t>(halves, size, 0x7f80)
                                                        : finite<uint16_t>(halves, size, 0x7c00);
    if (!good) all = false;
  });
  *out = all;
}
