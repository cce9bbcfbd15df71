// Quantises a row of floats to int8 or float8_e4m3fn codes with scales.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../rows.h"
#include "../simd.h"

// Where quantised rows are written: codes [M, K], and scales [M, G] of groups of inputs. static_scales: null, or one
// scale per row (static_stride 1), or one scale for all rows (static_stride 0).
struct Quantizer {
  int8_t *codes;
  float *scales;
  bool is_float8;
  int64_t group_size;  // a multiple of 16, or all inputs
  const float *static_scales;
  int64_t static_stride;

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

// Returns the codes of numbers from -448 to 448, rounded to nearest, ties to even. The code of a magnitude of at least
// 2^-6 keeps three bits of the mantissa. The code of a smaller magnitude is a multiple of 2^-9. At 2^-6 both formulas
// give 8.
inline Ints to_float8(Floats x) {
  const Ints bits = as_ints(x), magnitude = bit_and(bits, splat(0x7fffffff)), least = as_ints(splat(0x1p-6f));
  const Ints normal = larger(magnitude, least), odd = bit_and(shift_right<20>(normal), splat(1));
  const Ints large = shift_right<20>(add(add(normal, splat(0x7ffff)), odd));
  const Ints small = round_to_ints(multiply(as_floats(smaller(magnitude, least)), splat(512.0f)));
  return add(add(subtract(large, splat((127 - 7) * 8 + 8)), small), bit_and(shift_right<24>(bits), splat(0x80)));
}

inline Ints to_int8(Floats x) { return round_to_ints(x); }

// Quantises row number `row`: x [K], padded with zeros to a multiple of 16.
inline void quantize_row(const Quantizer &quantizer, int64_t row, const float *x, int64_t count) {
  const int64_t num_groups = divide_up(count, quantizer.group_size);
  const Floats lowest = splat(quantizer.is_float8 ? -448.0f : -128.0f), highest = splat(quantizer.largest_code());
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t begin = group * quantizer.group_size, end = std::min(begin + quantizer.group_size, count);
    const float magnitude = largest_magnitude(x + begin, divide_up(end - begin, LANES) * LANES);
    const bool finite = magnitude <= std::numeric_limits<float>::max();
    const float row_scale = quantizer.static_scales ? quantizer.static_scales[row * quantizer.static_stride] : magnitude / quantizer.largest_code();
    const float scale = quantizer.static_scales || row_scale > 0 ? row_scale : 1.0f;
    quantizer.scales[row * num_groups + group] = finite ? scale : NAN;
    for (int64_t i = begin; i < end; i += LANES) {
      const Floats ratio = smaller(larger(divide(load(x + i), splat(scale)), lowest), highest);
      const Ints code = quantizer.is_float8 ? to_float8(ratio) : to_int8(ratio);
      alignas(16) int8_t bytes[LANES];
      store_bytes(bytes, finite ? code : splat(0));
      std::memcpy(quantizer.codes + row * count + i, bytes, std::min(LANES, end - i));
    }
  }
}
