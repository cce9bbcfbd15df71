// One row of floats as int8 codes and a scale.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../rows.h"
#include "../simd.h"

// The largest magnitude of `count` floats, a multiple of 16; not finite if any of them is not (bits of magnitudes compare like integers).
inline float largest_magnitude(const float *x, int64_t count) {
  Ints magnitude = splat(0);
  for (int64_t i = 0; i < count; i += LANES) magnitude = larger(magnitude, bit_and(as_ints(load(x + i)), splat(0x7fffffff)));
  const int32_t bits = largest(magnitude);
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Returns the scale. x is padded with zeros to a multiple of 16.
inline float quantize_row(const float *x, int64_t count, int8_t *codes) {
  const float magnitude = largest_magnitude(x, divide_up(count, LANES) * LANES);
  const bool finite = magnitude <= std::numeric_limits<float>::max();
  const float scale = finite ? magnitude / 127 : NAN, divisor = scale > 0 ? scale : 1.0f;
  for (int64_t i = 0; i < count; i += LANES) {
    const Ints code = round_to_ints(divide(load(x + i), splat(divisor)));
    alignas(16) int8_t bytes[LANES];
    store_bytes(bytes, finite ? smaller(larger(code, splat(-127)), splat(127)) : splat(0));
    std::memcpy(codes + i, bytes, std::min(LANES, count - i));
  }
  return finite ? divisor : scale;
}
