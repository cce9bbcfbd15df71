// Quantises a row of floats to int8 or float8_e4m3fn codes with scales.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../rows.h"
#include "../simd.h"

// The destination of rows: codes [M, K] and scales [M, G] of groups of inputs. If `chosen` is given, it holds static
// scales, `chosen_stride` apart from row to row.
struct Quantizer {
  int8_t *codes;
  float *scales;
  bool is_float8;
  int64_t group_size;  // a multiple of 16, or all inputs
  const float *chosen;
  int64_t chosen_stride;

  float largest_code() const { return is_float8 ? 448.0f : 127.0f; }
};

// Returns the largest magnitude of `count` floats; `count` is a multiple of 16. The result is not finite if a float is
// not finite: bits of magnitudes compare like integers.
inline float largest_magnitude(const float *x, int64_t count) {
  Ints magnitude = splat(0);
  for (int64_t i = 0; i < count; i += LANES) magnitude = larger(magnitude, bit_and(as_ints(load(x + i)), splat(0x7fffffff)));
  const int32_t bits = largest(magnitude);
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Returns the codes of numbers from -448 to 448, rounded to nearest, ties to even. From 2^-6 on a code keeps three bits
// of the mantissa; below, it counts multiples of 2^-9. At 2^-6 both formulas give 8.
inline Ints to_float8(Floats x) {
  const Ints bits = as_ints(x), magnitude = bit_and(bits, splat(0x7fffffff)), least = as_ints(splat(0x1p-6f));
  const Ints normal = larger(magnitude, least), odd = bit_and(shift_right<20>(normal), splat(1));
  const Ints large = shift_right<20>(add(add(normal, splat(0x7ffff)), odd));
  const Ints small = round_to_ints(multiply(as_floats(smaller(magnitude, least)), splat(512.0f)));
  return add(add(subtract(large, splat((127 - 7) * 8 + 8)), small), bit_and(shift_right<24>(bits), splat(0x80)));
}

inline Ints to_int8(Floats x) { return round_to_ints(x); }

// Quantises row number `row`: x [K], padded with zeros to a multiple of 16.
inline void quantize_row(const Quantizer &to, int64_t row, const float *x, int64_t count) {
  const int64_t num_groups = divide_up(count, to.group_size);
  const Floats lowest = splat(to.is_float8 ? -448.0f : -128.0f), highest = splat(to.largest_code());
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t begin = group * to.group_size, end = std::min(begin + to.group_size, count);
    const float magnitude = largest_magnitude(x + begin, divide_up(end - begin, LANES) * LANES);
    const bool finite = magnitude <= std::numeric_limits<float>::max();
    const float own = to.chosen ? to.chosen[row * to.chosen_stride] : magnitude / to.largest_code();
    const float scale = to.chosen || own > 0 ? own : 1.0f;
    to.scales[row * num_groups + group] = finite ? scale : NAN;
    for (int64_t i = begin; i < end; i += LANES) {
      const Floats ratio = smaller(larger(divide(load(x + i), splat(scale)), lowest), highest);
      const Ints code = to.is_float8 ? to_float8(ratio) : to_int8(ratio);
      alignas(16) int8_t bytes[LANES];
      store_bytes(bytes, finite ? code : splat(0));
      std::memcpy(to.codes + row * count + i, bytes, std::min(LANES, end - i));
    }
  }
}
