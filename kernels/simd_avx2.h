// The vectors of simd.h with AVX2 and FMA, in a simple form. AVX2 has no dot products of bytes or bfloat16.
#pragma once

#include "rows.h"

constexpr int ACCUMULATORS = 6;  // pairs of registers; 4 of the 16 registers are left for operands

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};

inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats load(const float *at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
inline Ints load(const uint8_t *at) {
  const auto *halves = reinterpret_cast<const __m256i *>(at);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Ints load_bytes(const int8_t *at) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Ints load_halves(const uint16_t *at) {
  const auto *halves = reinterpret_cast<const __m128i *>(at);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
}
inline Floats load_float16(const uint16_t *at) {
  const auto *halves = reinterpret_cast<const __m128i *>(at);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
// In each lane: a number of `even` in the lower half, the number of `odd` in the upper half.
inline Ints interleave_halves(const uint16_t *even, const uint16_t *odd) {
  const auto quarters = [](const uint16_t *at) {  // 0, 2, 1, 3
    return _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)), 0xd8);
  };
  const __m256i a = quarters(even), b = quarters(odd);
  return {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
}
inline void store(float *at, Floats x) {
  _mm256_storeu_ps(at, x.low);
  _mm256_storeu_ps(at + 8, x.high);
}
inline void store(uint8_t *at, Ints x) {
  auto *halves = reinterpret_cast<__m256i *>(at);
  _mm256_storeu_si256(halves, x.low);
  _mm256_storeu_si256(halves + 1, x.high);
}
inline void store_halves(uint16_t *at, Ints x) {
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), both);
}
inline void store_bytes(int8_t *at, Ints x) {
  alignas(32) int32_t wide[LANES];
  _mm256_store_si256(reinterpret_cast<__m256i *>(wide), x.low);
  _mm256_store_si256(reinterpret_cast<__m256i *>(wide + 8), x.high);
  for (int lane = 0; lane < LANES; ++lane) at[lane] = static_cast<int8_t>(wide[lane]);
}

inline void store_float16(uint16_t *at, Floats x) {  // rounded to nearest, ties to even
  _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(at + 8), _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}

inline Ints as_ints(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline Floats as_floats(Ints x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Ints round_to_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }  // ties to even

inline Ints bit_and(Ints a, Ints b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Ints bit_xor(Ints a, Ints b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints subtract(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline Ints multiply(Ints a, Ints b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline Ints larger(Ints a, Ints b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
inline Ints smaller(Ints a, Ints b) { return {_mm256_min_epi32(a.low, b.low), _mm256_min_epi32(a.high, b.high)}; }
template <int BITS> inline Ints shift_left(Ints a) { return {_mm256_slli_epi32(a.low, BITS), _mm256_slli_epi32(a.high, BITS)}; }
template <int BITS> inline Ints shift_right(Ints a) { return {_mm256_srai_epi32(a.low, BITS), _mm256_srai_epi32(a.high, BITS)}; }
inline Ints lookup(Ints bytes, Ints indices) { return {_mm256_shuffle_epi8(bytes.low, indices.low), _mm256_shuffle_epi8(bytes.high, indices.high)}; }
inline Ints splat_bytes(const uint8_t (&bytes)[16]) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(bytes)));
  return {both, both};
}
inline Ints interleave_low(Ints a, Ints b) { return {_mm256_unpacklo_epi8(a.low, b.low), _mm256_unpacklo_epi8(a.high, b.high)}; }
inline Ints interleave_high(Ints a, Ints b) { return {_mm256_unpackhi_epi8(a.low, b.low), _mm256_unpackhi_epi8(a.high, b.high)}; }
inline int32_t largest(Ints x) {
  const __m256i eight = _mm256_max_epi32(x.low, x.high);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline int32_t sum(Ints x) {
  const __m256i eight = _mm256_add_epi32(x.low, x.high);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats subtract(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }   // b if either is NaN
inline Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }  // b if either is NaN
inline float largest(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline float sum(Floats x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float first(Floats x) { return _mm256_cvtss_f32(x.low); }
inline Floats multiply(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats divide(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

inline __m256 round_to_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), upper = _mm256_castsi256_ps(_mm256_set1_epi32(-65536));
  return _mm256_and_ps(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)), upper);
}
inline Floats round_to_bfloat16(Floats x) { return {round_to_bfloat16(x.low), round_to_bfloat16(x.high)}; }  // as to_bfloat16 does
inline void store_bfloat16(uint16_t *at, Floats x) {  // rounded to nearest, ties to even
  const Floats rounded = round_to_bfloat16(x);
  store_halves(at, {_mm256_srli_epi32(_mm256_castps_si256(rounded.low), 16), _mm256_srli_epi32(_mm256_castps_si256(rounded.high), 16)});
}

inline __m256 dot_bfloat16(__m256 sum, __m256i a, __m256i b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  const __m256 even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), sum);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high)), even);
}

// dot_bytes multiplies the four unsigned bytes of a lane (factors_of) by a step of a row: four integers. An integer has
// one or two limbs (kernels/linear/int_weight.cpp). Both operands are widened to 16 bits, and all limbs share one sum.
// vpmaddubsw on bytes would saturate.
struct Shorts {
  Ints even, odd;
};
constexpr int sums_of(int) { return 1; }
constexpr int SUM_WORDS = 2;  // words of a step, per sum
inline void put_limb(int32_t *step, int limb, const int8_t *from) {  // the lower limb first
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  __m128i shorts = _mm_shufflelo_epi16(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(bytes)), 0xd8);
  auto *to = reinterpret_cast<__m128i *>(step);
  if (limb) shorts = _mm_add_epi16(_mm_slli_epi16(shorts, 8), _mm_loadl_epi64(to));
  _mm_storel_epi64(to, shorts);
}
inline Shorts splat_step(const int32_t *words) { return {splat(words[0]), splat(words[1])}; }
inline Shorts factors_of(Ints bytes) {
  const __m256i even = _mm256_set1_epi16(0xff);
  return {{_mm256_and_si256(bytes.low, even), _mm256_and_si256(bytes.high, even)},
          {_mm256_srli_epi16(bytes.low, 8), _mm256_srli_epi16(bytes.high, 8)}};
}
inline __m256i dot_shorts(__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
inline Ints dot_shorts(Ints sum, Ints a, Ints b) { return {dot_shorts(sum.low, a.low, b.low), dot_shorts(sum.high, a.high, b.high)}; }
inline Ints dot_bytes(Ints sum, const Shorts &bytes, const Shorts &x) {  // modulo 2^32
  return dot_shorts(dot_shorts(sum, bytes.even, x.even), bytes.odd, x.odd);
}

// A run of dot products of int8 with codes of BITS bits: begin_run, dot_codes for at most steps_of_run(BITS) steps,
// end_run. With up to six bits a run adds in 16 bits, which hold two products a step without saturation. Codes of eight
// bits have the offset 128, which dot_codes subtracts: 16 bits hold two products of numbers between -128 and 127 by
// numbers between -127 and 127.
constexpr int steps_of_run(int bits) { return bits == 8 ? 1 << 20 : 32767 / (2 * 128 * ((1 << bits) - 1)); }
template <int BITS> inline Ints begin_run(Ints) { return splat(0); }
template <int BITS> inline __m256i dot_codes(__m256i run, __m256i codes, __m256i x) {
  if constexpr (BITS < 8) return _mm256_add_epi16(run, _mm256_maddubs_epi16(codes, x));
  const __m256i centred = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
  return dot_shorts(run, _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred)), _mm256_set1_epi16(1));
}
template <int BITS> inline Ints dot_codes(Ints run, Ints codes, Ints x) {
  return {dot_codes<BITS>(run.low, codes.low, x.low), dot_codes<BITS>(run.high, codes.high, x.high)};
}
template <int BITS> inline Ints end_run(Ints sum, Ints run) { return BITS == 8 ? run : dot_shorts(sum, run, splat(0x00010001)); }

// In each lane: sum plus the dot product of two pairs of bfloat16.
inline Floats dot_bfloat16(Floats sum, Ints a, Ints b) {
  return {dot_bfloat16(sum.low, a.low, b.low), dot_bfloat16(sum.high, a.high, b.high)};
}

// A pair of numbers for all lanes. It is stored as two float32 that bfloat16 can hold: converting it again for each
// product takes as long as the product.
struct FloatPair {
  __m256 even, odd;
};
constexpr int SPLAT_PAIR_WORDS = 2;
inline FloatPair splat_pair(const int32_t *words) {
  return {_mm256_castsi256_ps(_mm256_set1_epi32(words[0])), _mm256_castsi256_ps(_mm256_set1_epi32(words[1]))};
}
inline __m256 dot_bfloat16(__m256 sum, __m256i a, FloatPair b) {  // the bits of the function above
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  const __m256 even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), b.even, sum);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)), b.odd, even);
}
inline Floats dot_bfloat16(Floats sum, Ints a, FloatPair b) { return {dot_bfloat16(sum.low, a.low, b), dot_bfloat16(sum.high, a.high, b)}; }

// Transposes: swaps lane j of row i with lane i of row j.
inline void transpose(__m256i (&rows)[8]) {
  __m256i pairs[8];
  for (int i = 0; i < 8; i += 4) {  // 4 x 4 blocks within halves of a register
    const __m256i a = _mm256_unpacklo_epi32(rows[i], rows[i + 1]), b = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    const __m256i c = _mm256_unpacklo_epi32(rows[i + 2], rows[i + 3]), d = _mm256_unpackhi_epi32(rows[i + 2], rows[i + 3]);
    pairs[i] = _mm256_unpacklo_epi64(a, c), pairs[i + 1] = _mm256_unpackhi_epi64(a, c);
    pairs[i + 2] = _mm256_unpacklo_epi64(b, d), pairs[i + 3] = _mm256_unpackhi_epi64(b, d);
  }
  for (int i = 0; i < 4; ++i) {  // then the halves
    rows[i] = _mm256_permute2x128_si256(pairs[i], pairs[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2x128_si256(pairs[i], pairs[i + 4], 0x31);
  }
}
inline void transpose(Ints (&rows)[LANES]) {
  __m256i blocks[2][2][8];
  for (int i = 0; i < LANES; ++i) blocks[i / 8][0][i % 8] = rows[i].low, blocks[i / 8][1][i % 8] = rows[i].high;
  for (auto &half : blocks)
    for (auto &block : half) transpose(block);
  for (int i = 0; i < LANES; ++i) rows[i] = {blocks[0][i / 8][i % 8], blocks[1][i / 8][i % 8]};
}
