// Conversion of float8_e4m3fn codes to bfloat16, which represents all of them exactly.
#pragma once

#include <array>
#include <bit>

#include "../simd.h"

// Returns a code as bfloat16, including NaN. Codes below 2^-6 are multiples of 2^-9; their float32 has zeros in its
// lower half.
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

// Lookup tables by the four upper or lower bits of a code, repeated in each quarter of a register.
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
  Ints normal = load(BYTES.normal);  // by the upper bits: 0 if the code may be below 2^-6, else 128, for which `small` and `lower` return 0
  Ints upper = load(BYTES.upper);    // by the upper bits: sign and exponent; only the sign of small codes
  Ints small = load(BYTES.small);    // by the lower bits of a code below 2^-5: its upper byte without the sign
  Ints lower = load(BYTES.lower);    // by the lower bits of a code below 2^-5: its lower byte, xor the shifted lower bits
};

// Expands the codes of a register to two steps of 16 outputs and two inputs. NaN becomes 480: its group has a NaN
// scale.
inline void expand(const Float8Tables &tables, Ints codes, Ints (&steps)[2]) {
  const Ints half = splat(0x0f0f0f0f), low = bit_and(codes, half), high = bit_and(shift_right<4>(codes), half);
  const Ints index = add(low, lookup(tables.normal, high));
  const Ints lower = bit_xor(shift_left<4>(low), lookup(tables.lower, index));
  const Ints upper = add(lookup(tables.upper, high), lookup(tables.small, index));
  steps[0] = interleave_low(lower, upper), steps[1] = interleave_high(lower, upper);
}
