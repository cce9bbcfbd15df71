// cap * tanh(x / cap). kernels/soft_cap/reference.py is the specification. The bits of an element do not depend on its
// index.
#include <algorithm>

#include "../exp.h"
#include "../elements.h"
#include "../operator.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK = 1 << 13;  // elements that justify another thread

}  // namespace

// x and out [count] of one dtype.
OPERATOR(soft_cap, (const void *x, float cap, void *out, Dtype dtype, int64_t count)) {
  const Floats limit = splat(cap);
  parallel_for(divide_up(count, CHUNK), [&](int64_t chunk) {
    const int64_t end = std::min((chunk + 1) * CHUNK, count);
    for_dtype(dtype, [&]<Dtype DTYPE>() {
      for (int64_t i = chunk * CHUNK; i < end; i += LANES)
        store_elements<DTYPE>(out, i, count, rounded<DTYPE>(multiply(limit, tanh(divide(load_elements<DTYPE>(x, i, count), limit)))));
    });
  });
}
