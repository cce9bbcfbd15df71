// The paged cache in the layout of kernels/kv_format.py.
#pragma once

#include <cstdint>

#include "rows.h"
#include "simd.h"

enum class KVFormat : int32_t { unquantised, int8, float8, int4 };  // the numbers in kernels/kv_format.py

// The keys or the values of one layer: N blocks of B slots; each slot holds the vectors of G heads.
struct PagedVectors {
  uint8_t *stored;   // [N, B, G, stored_size]: vectors or codes
  void *scales;      // [N, B, G, scales_size] float32, or float16 pairs of scale and minimum; static scales [G]; null if unquantised
  int64_t block_size, num_heads, channels;
  int64_t stored_size, scales_size;  // elements of a vector; an element of int4 is a byte with two codes
  KVFormat format;
  Dtype dtype;       // of the decoded vectors
  int32_t has_margin;  // whether 64 bytes after the end of `stored` may be read

  bool has_static_scales() const { return scales && scales_size == 0; }
  int64_t index(int64_t slot, int64_t head) const { return slot * num_heads + head; }  // of a vector
  int64_t stored_bytes() const {
    return format != KVFormat::unquantised ? stored_size : stored_size * (dtype == Dtype::float32 ? 4 : 2);
  }
};

// Returns the values of e4m3 codes times 2^-120: sign, exponent and mantissa are moved to the bits of a float32. The NaN
// code gives a number: with dynamic scales the scale of a vector with NaN is NaN.
inline Floats downscaled_float8(Ints codes) {
  return as_floats(add(bit_and(codes, splat(INT32_MIN)), shift_left<20>(bit_and(codes, splat(0x7f)))));
}

// Static scales cannot express NaN, so one code means NaN. These functions add a constant to the bits of that code's
// value. The sum is NaN.
inline Floats with_nan_int8(Floats numbers, Ints codes) {  // code -128
  return as_floats(add(as_ints(numbers), bit_and(shift_right<31>(add(codes, splat(127))), splat(0x3cc00000))));
}
inline Floats with_nan_float8(Floats downscaled, Ints codes) {  // code 0x7f
  const Ints is_nan = shift_right<31>(subtract(splat(0x7e), bit_and(codes, splat(0x7f))));
  return as_floats(add(as_ints(downscaled), bit_and(is_nan, splat(0x78000000))));
}

// The number of floats that read_vector writes: whole registers, and all codes of int4.
inline int64_t decoded_size(const PagedVectors &cache) {
  const int64_t written = cache.format == KVFormat::int4 ? 2 * cache.stored_size : cache.channels;
  return divide_up(written, LANES) * LANES;
}

// x has space for all codes of the vector, which may have fewer channels.
inline void read_int4(const PagedVectors &cache, const uint8_t *stored, const uint16_t *ranges, float *x) {
  for (int64_t i = 0; i < cache.stored_size; ++i) {
    x[2 * i] = static_cast<float>(stored[i] & 15);
    x[2 * i + 1] = static_cast<float>(stored[i] >> 4);
  }
  const int64_t num_groups = cache.scales_size / 2, size = 2 * cache.stored_size / num_groups;
  for (int64_t group = 0; group < num_groups; ++group) {
    const float scale = _cvtsh_ss(ranges[2 * group]), lowest = _cvtsh_ss(ranges[2 * group + 1]);
    for (int64_t i = group * size; i < (group + 1) * size; ++i) x[i] = x[i] * scale + lowest;
  }
}

// Calls put(index of the first channel, values) for 16 values of an int8 or float8 vector at a time. Values beyond the
// last channel are undefined.
template <class Put> void read_codes(const PagedVectors &cache, int64_t index, int64_t head, Put &&put) {
  const bool is_int8 = cache.format == KVFormat::int8, is_static = cache.has_static_scales();
  const auto *codes = reinterpret_cast<const int8_t *>(cache.stored) + index * cache.stored_size;
  const Floats scale = splat(static_cast<const float *>(cache.scales)[is_static ? head : index]);
  const auto read = [&]<bool INT8, bool STATIC>() {
    const auto values_at = [&](const int8_t *at) {
      const Ints wide = load_bytes(at);
      Floats numbers = INT8 ? to_floats(wide) : downscaled_float8(wide);
      if (STATIC) numbers = INT8 ? with_nan_int8(numbers, wide) : with_nan_float8(numbers, wide);
      return multiply(INT8 ? numbers : multiply(numbers, splat(0x1p120f)), scale);
    };
    int64_t i = 0;
    for (; i + LANES <= cache.channels; i += LANES) put(i, values_at(codes + i));
    if (i == cache.channels) return;
    int8_t last[LANES] = {};
    std::memcpy(last, codes + i, cache.channels - i);
    put(i, values_at(last));
  };
  if (is_int8)
    is_static ? read.template operator()<true, true>() : read.template operator()<true, false>();
  else
    is_static ? read.template operator()<false, true>() : read.template operator()<false, false>();
}

// Decodes a vector to float32, before rounding to the cache's dtype. x has space for decoded_size(cache) floats.
inline void read_vector(const PagedVectors &cache, int64_t index, int64_t head, float *x) {
  const uint8_t *stored = cache.stored + index * cache.stored_bytes();
  if (cache.format == KVFormat::unquantised) {
    read_floats(stored, cache.dtype, 0, cache.channels, x);
  } else if (cache.format == KVFormat::int4) {
    read_int4(cache, stored, static_cast<const uint16_t *>(cache.scales) + index * cache.scales_size, x);
  } else {
    read_codes(cache, index, head, [&](int64_t i, Floats numbers) { store(x + i, numbers); });
  }
}
