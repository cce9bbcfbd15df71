// Weights in ggml's blocks as kernels read them: codes, scales and minimums. kernels/linear/block_weight.py defines
// their layout.
#pragma once

#include <bit>

#include "activations.h"

namespace {

constexpr int64_t VECTOR_BYTES = STEP * LANES, UNIT_STEPS = 8, UNIT = UNIT_STEPS * STEP;
constexpr int32_t SCALE_OFFSET = 32;  // added to scales of six bits

// What codes stand for: numbers, or indices of IQ4_VALUES or FP4_VALUES.
enum class Values { numbers, iq4, fp4 };

// A ggml type: bits per code, inputs per group and per block, bits per scale. With minimums a value is scale * code -
// minimum, else scale * (code - 2^(bits - 1)), or scale * what an index chooses. Scales of FP4 are float8: e8m0 for groups
// of 32, e4m3 for groups of 16, which a global scale multiplies.
template <int BITS, int64_t GROUP, int64_t BLOCK, bool MINIMUMS, int SCALE_BITS = 8, Values VALUES = Values::numbers> struct Kind {
  static constexpr bool has_indices = VALUES != Values::numbers, is_fp4 = VALUES == Values::fp4, has_global_scale = is_fp4 && GROUP == 16;
  static constexpr int bits = BITS, scale_bits = SCALE_BITS, byte_bits = is_fp4 ? 5 : has_indices ? 8 : BITS;  // byte_bits: of what `codes_of` returns
  static constexpr bool has_minimums = MINIMUMS, has_scales = BLOCK > GROUP && !is_fp4;
  static constexpr int64_t group = GROUP, block = BLOCK, units = BLOCK / UNIT, groups_of_unit = UNIT / GROUP;
  static constexpr int32_t offset = MINIMUMS ? 1 : 1 << (byte_bits - 1);  // sums of activations are multiplied by -offset
  static constexpr int64_t factors_bytes = (is_fp4 ? BLOCK / GROUP : 2) * LANES, scales_bytes = has_scales ? BLOCK / GROUP * LANES * SCALE_BITS / 8 : 0;
  static constexpr int64_t expanded_bytes = SCALE_BITS == 6 ? BLOCK / GROUP * LANES : 1;  // of `expand_scales`
  static constexpr int64_t head_bytes = (factors_bytes + scales_bytes) * (1 + MINIMUMS);
  static constexpr int64_t unit_bytes = BITS * VECTOR_BYTES, block_bytes = head_bytes + units * unit_bytes;
};

// Shifts x to the left, or to the right if `bits` is negative. `bits` is a constant after loops are unrolled.
inline Ints shifted(Ints x, int bits) {
  switch (bits) {
    case 4: return shift_left<4>(x);
    case 3: return shift_left<3>(x);
    case 2: return shift_left<2>(x);
    case 1: return shift_left<1>(x);
    case -1: return shift_right<1>(x);
    case -2: return shift_right<2>(x);
    case -3: return shift_right<3>(x);
    case -4: return shift_right<4>(x);
    default: return x;
  }
}

// Returns the bits MASK of each byte, after a shift to the right.
template <int SHIFT, int32_t MASK> inline Ints bits_of(Ints x) { return bit_and(shift_right<SHIFT>(x), splat(MASK * 0x01010101)); }

// The values of IQ4_NL and IQ4_XS plus 128.
alignas(16) constexpr uint8_t IQ4_VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
// The doubles of the values of FP4 plus 16.
alignas(16) constexpr uint8_t FP4_VALUES[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// Returns the codes of step `step` of a unit, or what indices choose.
template <class Kind> inline Ints codes_of(const uint8_t *unit, int step) {
  if constexpr (Kind::bits == 3) {
    const auto vector = [&](int number) { return load(unit + number * VECTOR_BYTES); };
    if (step == 6) return bit_xor(bits_of<6, 3>(vector(0)), bits_of<4, 4>(vector(1)));
    if (step == 7) return bit_xor(bits_of<7, 1>(vector(1)), bits_of<5, 6>(vector(2)));
    return step % 2 ? bits_of<3, 7>(vector(step / 2)) : bit_and(vector(step / 2), splat(0x07070707));
  }
  if constexpr (Kind::bits == 8) return load(unit + step * VECTOR_BYTES);
  const Ints pair = load(unit + step / 2 * VECTOR_BYTES);
  const Ints low = bit_and(step % 2 ? shift_right<4>(pair) : pair, splat(0x0f0f0f0f));
  if constexpr (Kind::has_indices) return lookup(splat_bytes(Kind::is_fp4 ? FP4_VALUES : IQ4_VALUES), low);
  if constexpr (Kind::bits == 5) return bit_xor(low, bit_and(shifted(load(unit + 4 * VECTOR_BYTES), 4 - step), splat(0x10101010)));
  if constexpr (Kind::bits == 6)
    return bit_xor(low, bit_and(shifted(load(unit + (4 + step / 4) * VECTOR_BYTES), 4 - 2 * (step % 4)), splat(0x30303030)));
  return low;
}

// Expands the scales of a block to bytes if they have six bits.
template <class Kind> inline void expand_scales(const uint8_t *block, uint8_t *bytes) {
  if constexpr (Kind::scale_bits == 6) {
    const Ints a = load(block + Kind::factors_bytes), b = load(block + Kind::factors_bytes + VECTOR_BYTES);
    const Ints c = load(block + Kind::factors_bytes + 2 * VECTOR_BYTES), mask = splat(0x3f3f3f3f);
    store(bytes, bit_and(a, mask)), store(bytes + VECTOR_BYTES, bit_and(b, mask)), store(bytes + 2 * VECTOR_BYTES, bit_and(c, mask));
    store(bytes + 3 * VECTOR_BYTES, bit_xor(bits_of<6, 3>(a), bit_xor(bits_of<4, 12>(b), bits_of<2, 48>(c))));
  }
}

// Returns numbers of eight bits as float32, halved, because the values of FP4 are doubled.
inline Floats half_of_e8m0(Ints bytes) {  // 0 is 2^-127, a denormal
  return multiply(as_floats(larger(shift_left<23>(bit_and(bytes, splat(255))), splat(1 << 22))), splat(0.5f));
}
inline Floats half_of_e4m3(Ints bytes) { return multiply(as_floats(shift_left<20>(bytes)), splat(0x1p119f)); }  // without sign

// Returns the scales of a group of a block (part 0), or its minimums (part 1). `expanded`: from `expand_scales`.
template <class Kind> inline Floats scales_of(const uint8_t *block, const uint8_t *expanded, int64_t group, int64_t part) {
  if constexpr (Kind::is_fp4) {
    const Ints bytes = load_bytes(reinterpret_cast<const int8_t *>(block + group * LANES));
    return Kind::has_global_scale ? half_of_e4m3(bytes) : half_of_e8m0(bytes);
  }
  const Floats factor = load_float16(reinterpret_cast<const uint16_t *>(block + part * Kind::factors_bytes));
  if constexpr (!Kind::has_scales) return factor;
  if constexpr (Kind::scale_bits == 6)
    return multiply(factor, to_floats(subtract(load_bytes(reinterpret_cast<const int8_t *>(expanded + group * LANES)), splat(SCALE_OFFSET))));
  const uint8_t *scales = block + Kind::factors_bytes * (1 + Kind::has_minimums) + part * Kind::scales_bytes + group * LANES;
  return multiply(factor, to_floats(load_bytes(reinterpret_cast<const int8_t *>(scales))));
}

// Returns the global scale of a weight, which is after its tiles; 1 if the kind has none.
template <class Kind> double global_scale_of(const uint8_t *memory, int64_t num_tiles, int64_t num_inputs) {
  double scale = 1;
  if constexpr (Kind::has_global_scale) std::memcpy(&scale, memory + num_tiles * (num_inputs / Kind::block) * Kind::block_bytes, sizeof scale);
  return scale;
}

// Multiplies `count` products, a multiple of LANES, by the weight's global scale.
template <class Kind> void multiply_by_global_scale(const uint8_t *memory, int64_t num_tiles, int64_t num_inputs, int64_t count, float *products) {
  if constexpr (Kind::has_global_scale) {
    const Floats scale = splat(static_cast<float>(global_scale_of<Kind>(memory, num_tiles, num_inputs)));
    for (int64_t i = 0; i < count; i += LANES) store(products + i, multiply(load(products + i), scale));
  }
}

// Expands tiles of blocks to the format of grouped int8 weights in int_weight.cpp: bytes, then float scales, then
// minimums.
template <class Kind> void expand_tiles(const uint8_t *block, int64_t num_tiles, int64_t num_inputs, uint8_t *bytes) {
  const uint8_t *const end = block + num_tiles * (num_inputs / Kind::block) * Kind::block_bytes;
  auto *scales = reinterpret_cast<float *>(bytes + num_tiles * num_inputs * LANES);
  float *minimums = scales + num_tiles * (num_inputs / Kind::group) * LANES;
  alignas(64) uint8_t expanded[Kind::expanded_bytes];
  for (; block != end; block += Kind::block_bytes) {
    expand_scales<Kind>(block, expanded);
    for (int64_t group = 0; group < Kind::block / Kind::group; ++group, scales += LANES) {
      store(scales, scales_of<Kind>(block, expanded, group, 0));
      if constexpr (Kind::has_minimums) store(minimums, scales_of<Kind>(block, expanded, group, 1)), minimums += LANES;
    }
    const uint8_t *unit = block + Kind::head_bytes;
    for (int64_t index = 0; index < Kind::units; ++index, unit += Kind::unit_bytes)
      UNROLL
      for (int step = 0; step < UNIT_STEPS; ++step, bytes += VECTOR_BYTES) store(bytes, codes_of<Kind>(unit, step));
  }
}

// Writes one row as integers of LIMBS bytes. If the kind has minimums, it replaces each sum of the integers by sum * scale as a
// float, because the minimum of a group is multiplied by this number.
template <class Kind, int LIMBS, class AllRows, class Panel>
void fill_row_of_kind(const AllRows &all_rows, const Panel &panel, int64_t row, const Rows &rows, int64_t index) {
  fill_row<LIMBS>(all_rows, panel, row, rows, index);
  if constexpr (Kind::has_minimums)
    for (int64_t at = row; at < all_rows.num_segments * panel.num_rows; at += panel.num_rows)
      panel.sums[at] = std::bit_cast<int32_t>(static_cast<float>(panel.sums[at]) * panel.scales[at]);
}

// Calls work(Kind) for a ggml type.
template <class Work> void with_kind(Codes codes, Work &&work) {
  if (codes == Codes::q4_0)
    work(Kind<4, 32, 32, false>());
  else if (codes == Codes::q8_0)
    work(Kind<8, 32, 32, false>());
  else if (codes == Codes::iq4_nl)
    work(Kind<4, 32, 32, false, 8, Values::iq4>());
  else if (codes == Codes::iq4_xs)
    work(Kind<4, 32, 256, false, 8, Values::iq4>());
  else if (codes == Codes::mxfp4)
    work(Kind<4, 32, 32, false, 8, Values::fp4>());
  else if (codes == Codes::nvfp4)
    work(Kind<4, 16, 64, false, 8, Values::fp4>());
  else if (codes == Codes::q4_1)
    work(Kind<4, 32, 32, true>());
  else if (codes == Codes::q5_0)
    work(Kind<5, 32, 32, false>());
  else if (codes == Codes::q5_1)
    work(Kind<5, 32, 32, true>());
  else if (codes == Codes::q4_k)
    work(Kind<4, 32, 256, true>());
  else if (codes == Codes::q5_k)
    work(Kind<5, 32, 256, true>());
  else if (codes == Codes::q6_k)
    work(Kind<6, 16, 256, false>());
  else
    work(Kind<3, 16, 256, false, 6>());
}

}  // namespace
