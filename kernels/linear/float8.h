// Codes of float8_e4m3fn become bfloat16, in which every one of them is exact.
#pragma once

#include <algorithm>
#include <cstring>

#include "../rows.h"
#include "../simd.h"

constexpr int32_t FLOAT8_BITS = -8;  // in the place of a code's bits, as kernels/linear/float8_weight.py passes it

// What the four upper or lower bits of a code say, in each quarter of a register.
struct Float8Tables {
  Ints normal;  // by the upper bits: 0 if the code may be less than 2^-6, else 128, for which a lookup gives 0
  Ints upper;   // by the upper bits: sign and exponent, without those of small codes
  Ints small;   // by the lower bits of a code below 2^-5: its upper byte without the sign
  Ints lower;   // by the lower bits of a code below 2^-5: its lower byte, xor those bits shifted

  Float8Tables() {
    uint8_t tables[4][64];
    for (int i = 0; i < 64; ++i) {
      const int code = i % 16, exponent = code % 8;
      const float value = code < 8 ? code * 0x1p-9f : (8 + code % 8) * 0x1p-9f;
      const uint16_t number = to_bfloat16(value);
      tables[0][i] = exponent ? 128 : 0;
      tables[1][i] = code / 8 * 128 + (exponent ? 60 + exponent : 0);
      tables[2][i] = number >> 8;
      tables[3][i] = static_cast<uint8_t>(number) ^ static_cast<uint8_t>(code << 4);
    }
    normal = load(tables[0]), upper = load(tables[1]), small = load(tables[2]), lower = load(tables[3]);
  }
};

// Two steps of 16 outputs and two inputs, out of the codes of a register. NaN becomes 480: a weight with NaN has it in its scales.
inline void expand(const Float8Tables &tables, Ints codes, Ints (&steps)[2]) {
  const Ints half = splat(0x0f0f0f0f), low = bit_and(codes, half), high = bit_and(shift_right<4>(codes), half);
  const Ints place = add(low, lookup(tables.normal, high));
  const Ints lower = bit_xor(shift_left<4>(low), lookup(tables.lower, place));
  const Ints upper = add(lookup(tables.upper, high), lookup(tables.small, place));
  steps[0] = interleave_low(lower, upper), steps[1] = interleave_high(lower, upper);
}

// One code, NaN as well.
inline uint16_t float8_to_bfloat16(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 127) == 127) return 0x7fc0;
  if (exponent) return (code & 128) << 8 | (exponent + 120) << 7 | mantissa << 4;
  return to_bfloat16((code & 128 ? -1.0f : 1.0f) * mantissa * 0x1p-9f);
}
