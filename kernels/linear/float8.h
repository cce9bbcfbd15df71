// Codes of float8_e4m3fn become bfloat16, in which every one of them is exact.
#pragma once

#include <array>
#include <bit>

#include "../simd.h"

// One code as bfloat16, NaN as well. Those below 2^-6 are multiples of 2^-9, of which a float32 has no more than its upper half.
constexpr uint16_t bfloat16_of_float8(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 127) == 127) return 0x7fc0;
  const int magnitude = exponent ? (exponent + 120) << 7 | mantissa << 4 : std::bit_cast<uint32_t>(mantissa * 0x1p-9f) >> 16;
  return static_cast<uint16_t>((code & 128) << 8 | magnitude);
}

inline constexpr auto BFLOAT16_OF_FLOAT8 = [] {
  std::array<uint16_t, 256> numbers{};
  for (int code = 0; code < 256; ++code) numbers[code] = bfloat16_of_float8(code);
  return numbers;
}();

// What the four upper or lower bits of a code say, in each quarter of a register.
struct Float8Tables {
  struct Bytes {
    alignas(64) uint8_t normal[64], upper[64], small[64], lower[64];
  };
  static constexpr Bytes BYTES = [] {
    Bytes bytes{};
    for (int i = 0; i < 64; ++i) {
      const int code = i % 16, exponent = code % 8;
      bytes.normal[i] = exponent ? 128 : 0;
      bytes.upper[i] = static_cast<uint8_t>(code / 8 * 128 + (exponent ? 60 + exponent : 0));
      bytes.small[i] = static_cast<uint8_t>(bfloat16_of_float8(code) >> 8);
      bytes.lower[i] = static_cast<uint8_t>(bfloat16_of_float8(code) ^ code << 4);
    }
    return bytes;
  }();
  Ints normal = load(BYTES.normal);  // by the upper bits: 0 if the code may be less than 2^-6, else 128, for which a lookup gives 0
  Ints upper = load(BYTES.upper);    // by the upper bits: sign and exponent, without those of small codes
  Ints small = load(BYTES.small);    // by the lower bits of a code below 2^-5: its upper byte without the sign
  Ints lower = load(BYTES.lower);    // by the lower bits of a code below 2^-5: its lower byte, xor those bits shifted
};

// Two steps of 16 outputs and two inputs, out of the codes of a register. NaN becomes 480: a weight with NaN has it in its scales.
inline void expand(const Float8Tables &tables, Ints codes, Ints (&steps)[2]) {
  const Ints half = splat(0x0f0f0f0f), low = bit_and(codes, half), high = bit_and(shift_right<4>(codes), half);
  const Ints place = add(low, lookup(tables.normal, high));
  const Ints lower = bit_xor(shift_left<4>(low), lookup(tables.lower, place));
  const Ints upper = add(lookup(tables.upper, high), lookup(tables.small, place));
  steps[0] = interleave_low(lower, upper), steps[1] = interleave_high(lower, upper);
}
