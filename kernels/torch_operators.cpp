// torch's simplest operators, bit-identical, so that a replay runs them without Python, whose overhead exceeds their
// time. kernels/repeating.py lists them.
#include <algorithm>
#include <cstring>

#include "elements.h"
#include "operator.h"
#include "threads.h"

namespace {

constexpr int64_t CHUNK = 1 << 14;        // elements that justify another thread
constexpr int64_t CHUNK_BYTES = 1 << 15;  // bytes to copy that justify another thread
constexpr int64_t PIECE = 256;            // elements converted to float32 at once

// Calls work(first, end) for parts of `count` numbers. Each part begins at a multiple of 16.
template <class Work> void in_chunks(int64_t count, Work &&work) {
  parallel_for(divide_up(count, CHUNK), [&](int64_t chunk) { work(chunk * CHUNK, std::min((chunk + 1) * CHUNK, count)); });
}

}  // namespace

// out = a + b, all [count] of one dtype.
OPERATOR(torch_add, (const void *a, const void *b, void *out, Dtype dtype, int64_t count)) {
  in_chunks(count, [&](int64_t first, int64_t end) {
    for_dtype(dtype, [&]<Dtype DTYPE>() {
      for (int64_t i = first; i < end; i += LANES)
        store_elements<DTYPE>(out, i, count, rounded<DTYPE>(add(load_elements<DTYPE>(a, i, count), load_elements<DTYPE>(b, i, count))));
    });
  });
}

// out = a * factor, both [count] of one dtype.
OPERATOR(torch_scale, (const void *a, float factor, void *out, Dtype dtype, int64_t count)) {
  in_chunks(count, [&](int64_t first, int64_t end) {
    for_dtype(dtype, [&]<Dtype DTYPE>() {
      for (int64_t i = first; i < end; i += LANES)
        store_elements<DTYPE>(out, i, count, rounded<DTYPE>(multiply(load_elements<DTYPE>(a, i, count), splat(factor))));
    });
  });
}

// to = from, [count] each, of different dtypes.
OPERATOR(torch_convert, (const void *from, Dtype from_dtype, void *to, Dtype to_dtype, int64_t count)) {
  in_chunks(count, [&](int64_t first, int64_t end) {
    float numbers[PIECE];
    for (; first < end; first += PIECE) {
      const int64_t size = std::min(PIECE, end - first);
      read_floats(from, from_dtype, first, size, numbers);
      write_floats(to, to_dtype, first, size, numbers);
    }
  });
}

// Copies [d0, d1, d2] runs of `bytes` bytes. Strides are in bytes.
OPERATOR(torch_copy, (const char *from, int64_t from0, int64_t from1, int64_t from2, char *to, int64_t to0, int64_t to1, int64_t to2, int64_t d0,
                      int64_t d1, int64_t d2, int64_t bytes)) {
  const int64_t size = rows_of_chunk(CHUNK_BYTES, d1 * d2 * bytes);
  parallel_for(divide_up(d0, size), [&](int64_t chunk) {
    for (int64_t i = chunk * size; i < std::min((chunk + 1) * size, d0); ++i)
      for (int64_t j = 0; j < d1; ++j)
        for (int64_t k = 0; k < d2; ++k)
          std::memcpy(to + i * to0 + j * to1 + k * to2, from + i * from0 + j * from1 + k * from2, bytes);
  });
}
