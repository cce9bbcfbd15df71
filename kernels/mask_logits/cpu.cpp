// Sets logits to -inf for tokens whose bit is 0. kernels/mask_logits/reference.py is the specification.
#include <algorithm>

#include "../operator.h"
#include "../rows.h"
#include "../simd.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK = 1 << 16;  // logits that justify another thread
constexpr int64_t BITS = 32;        // per word

template <class Number> void mask_row(Number *x, const uint32_t *words, int64_t count, Number banned) {
  for (int64_t first = 0; first < count; first += BITS) {
    const uint32_t word = words[first / BITS];
    if (word == 0xffffffff) continue;
    const int64_t size = std::min(BITS, count - first);
    for (int64_t i = 0; i < size; ++i) x[first + i] = word >> i & 1 ? x[first + i] : banned;
  }
}

}  // namespace

// logits [rows, V] with a stride from row to row, in elements; bitmask [rows, ceil(V / 32)].
OPERATOR(mask_logits, (void *logits, Dtype dtype, const int32_t *bitmask, int64_t num_rows, int64_t vocab_size, int64_t stride)) {
  const int64_t size = rows_of_chunk(CHUNK, vocab_size), num_words = divide_up(vocab_size, BITS);
  parallel_for(divide_up(num_rows, size), [&](int64_t chunk) {
    for (int64_t row = chunk * size; row < std::min((chunk + 1) * size, num_rows); ++row) {
      const auto *words = reinterpret_cast<const uint32_t *>(bitmask) + row * num_words;
      if (dtype == Dtype::float32)  // copied as bits, so that the payload of a NaN does not change
        mask_row<uint32_t>(static_cast<uint32_t *>(logits) + row * stride, words, vocab_size, 0xff800000);
      else
        mask_row<uint16_t>(static_cast<uint16_t *>(logits) + row * stride, words, vocab_size, dtype == Dtype::bfloat16 ? 0xff80 : 0xfc00);
    }
  });
}
