// Reads rows of float32, bfloat16 or float16 as float32, and writes them (rounded to nearest, ties to even, as in
// torch).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

enum class Dtype : int32_t { float32, bfloat16, float16 };  // the numbers in kernels/dtypes.py

inline float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// float16 is converted eight numbers at a time, which the compiler does not do by itself. Single conversions take ten
// times as long.
inline void read_float16(const uint16_t *halves, int64_t count, float *x) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(x + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves + i))));
  for (; i < count; ++i) x[i] = _cvtsh_ss(halves[i]);
}

inline void write_float16(uint16_t *halves, int64_t count, const float *x) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i *>(halves + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < count; ++i) halves[i] = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT);
}

// Reads `count` numbers, starting `first` numbers after `rows`.
inline void read_floats(const void *rows, Dtype dtype, int64_t first, int64_t count, float *x) {
  const auto *halves = static_cast<const uint16_t *>(rows) + first;
  if (dtype == Dtype::float32)
    std::copy_n(static_cast<const float *>(rows) + first, count, x);  // memcpy does not allow null pointers, even for zero bytes
  else if (dtype == Dtype::bfloat16)
    for (int64_t i = 0; i < count; ++i) x[i] = from_bfloat16(halves[i]);
  else
    read_float16(halves, count, x);
}

inline void write_floats(void *rows, Dtype dtype, int64_t first, int64_t count, const float *x) {
  auto *halves = static_cast<uint16_t *>(rows) + first;
  if (dtype == Dtype::float32)
    std::copy_n(x, count, static_cast<float *>(rows) + first);
  else if (dtype == Dtype::bfloat16)
    for (int64_t i = 0; i < count; ++i) halves[i] = to_bfloat16(x[i]);
  else
    write_float16(halves, count, x);
}

// Rounds `count` numbers to the dtype and converts them back.
inline void round_to(Dtype dtype, float *x, int64_t count) {
  if (dtype == Dtype::bfloat16)
    for (int64_t i = 0; i < count; ++i) x[i] = from_bfloat16(to_bfloat16(x[i]));
  else if (dtype == Dtype::float16) {
    uint16_t halves[64];
    for (int64_t i = 0; i < count; i += 64) {
      const int64_t some = std::min<int64_t>(count - i, 64);
      write_float16(halves, some, x + i);
      read_float16(halves, some, x + i);
    }
  }
}
