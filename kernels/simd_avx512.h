// The vectors of simd.h with AVX-512 VNNI and BF16.
#pragma once

constexpr int ACCUMULATORS = 24;  // of the 32 registers; the rest hold operands

using Floats = __m512;
using Ints = __m512i;

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Ints splat(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats load(const float *at) { return _mm512_loadu_ps(at); }
inline Ints load(const uint8_t *at) { return _mm512_loadu_si512(at); }
inline Ints load_bytes(const int8_t *at) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at))); }
inline Ints load_halves(const uint16_t *at) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at))); }
inline Floats load_float16(const uint16_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at))); }
// In each lane: a number of `even` in the lower half, the number of `odd` in the upper half.
inline Ints interleave_halves(const uint16_t *even, const uint16_t *odd) {
  alignas(64) static constexpr uint16_t ORDER[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const auto both = [](const uint16_t *at) { return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at))); };
  return _mm512_permutex2var_epi16(both(even), _mm512_load_si512(ORDER), both(odd));
}
inline void store(float *at, Floats x) { _mm512_storeu_ps(at, x); }
inline void store(uint8_t *at, Ints x) { _mm512_storeu_si512(at, x); }
inline void store_bfloat16(uint16_t *at, Floats x) {  // rounded to nearest, ties to even; denormals become zero
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), (__m256i)_mm512_cvtneps_pbh(x));
}
inline void store_float16(uint16_t *at, Floats x) {  // rounded to nearest, ties to even
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_halves(uint16_t *at, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm512_cvtepi32_epi16(x)); }
inline void store_bytes(int8_t *at, Ints x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm512_cvtepi32_epi8(x)); }

inline Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints round_to_ints(Floats x) { return _mm512_cvtps_epi32(x); }  // ties to even

inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline Ints smaller(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
template <int BITS> inline Ints shift_left(Ints a) { return _mm512_slli_epi32(a, BITS); }
template <int BITS> inline Ints shift_right(Ints a) { return _mm512_srai_epi32(a, BITS); }
// Byte operations within each quarter (16 bytes) of a register. lookup selects the byte whose index is in the lower
// four bits of `indices`; interleave returns a, b, a, b, ...
inline Ints lookup(Ints bytes, Ints indices) { return _mm512_shuffle_epi8(bytes, indices); }
inline Ints splat_bytes(const uint8_t (&bytes)[16]) { return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(bytes))); }
inline Ints interleave_low(Ints a, Ints b) { return _mm512_unpacklo_epi8(a, b); }
inline Ints interleave_high(Ints a, Ints b) { return _mm512_unpackhi_epi8(a, b); }
inline int32_t largest(Ints x) { return _mm512_reduce_max_epi32(x); }
inline int32_t sum(Ints x) { return _mm512_reduce_add_epi32(x); }

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }   // b if either is NaN
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }  // b if either is NaN
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float first(Floats x) { return _mm512_cvtss_f32(x); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

inline Floats round_to_bfloat16(Floats x) {  // as to_bfloat16 does
  const Ints bits = as_ints(x), odd = bit_and(_mm512_srli_epi32(bits, 16), splat(1)), rounded = add(bits, add(odd, splat(0x7fff)));
  const Ints numbers = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), splat(0x7fc00000));
  return as_floats(bit_and(numbers, splat(-65536)));
}

// dot_bytes multiplies the four unsigned bytes of a lane (factors_of) by a step of a row: four integers. An integer has
// one or two limbs (kernels/linear/int_weight.cpp). Each limb is int8 and has its own sum.
constexpr int sums_of(int limbs) { return limbs; }
constexpr int SUM_WORDS = 1;  // words of a step, per sum
inline void put_limb(int32_t *step, int limb, const int8_t *from) { std::memcpy(step + limb, from, 4); }
inline Ints splat_step(const int32_t *words) { return splat(*words); }
inline Ints factors_of(Ints bytes) { return bytes; }
inline Ints dot_bytes(Ints sum, Ints bytes, Ints x) { return _mm512_dpbusd_epi32(sum, bytes, x); }  // modulo 2^32
inline Ints dot_shorts(Ints sum, Ints a, Ints b) { return _mm512_dpwssd_epi32(sum, a, b); }

// A run of dot products of int8 with codes of BITS bits: begin_run, dot_codes for at most steps_of_run(BITS) steps, end_run.
constexpr int steps_of_run(int) { return 1 << 20; }
template <int> inline Ints begin_run(Ints sum) { return sum; }
template <int> inline Ints dot_codes(Ints run, Ints codes, Ints x) { return _mm512_dpbusd_epi32(run, codes, x); }
template <int> inline Ints end_run(Ints, Ints run) { return run; }

// In each lane: sum plus the dot product of two pairs of bfloat16. The instruction treats denormals as zero.
inline Floats dot_bfloat16(Floats sum, Ints a, Ints b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// A pair of bfloat16 for all lanes, stored in a word.
constexpr int SPLAT_PAIR_WORDS = 1;
inline Ints splat_pair(const int32_t *words) { return splat(*words); }

// Transposes: swaps lane j of row i with lane i of row j.
inline void transpose(Ints (&rows)[LANES]) {
  Ints pairs[LANES];
  for (int i = 0; i < LANES; i += 4) {  // 4 x 4 blocks within quarters of a register
    const Ints a = _mm512_unpacklo_epi32(rows[i], rows[i + 1]), b = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    const Ints c = _mm512_unpacklo_epi32(rows[i + 2], rows[i + 3]), d = _mm512_unpackhi_epi32(rows[i + 2], rows[i + 3]);
    pairs[i] = _mm512_unpacklo_epi64(a, c), pairs[i + 1] = _mm512_unpackhi_epi64(a, c);
    pairs[i + 2] = _mm512_unpacklo_epi64(b, d), pairs[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  for (int i = 0; i < 4; ++i) {  // then the quarters
    const Ints even_top = _mm512_shuffle_i32x4(pairs[i], pairs[i + 4], 0x88), odd_top = _mm512_shuffle_i32x4(pairs[i], pairs[i + 4], 0xdd);
    const Ints even_low = _mm512_shuffle_i32x4(pairs[i + 8], pairs[i + 12], 0x88);
    const Ints odd_low = _mm512_shuffle_i32x4(pairs[i + 8], pairs[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(even_top, even_low, 0x88), rows[i + 8] = _mm512_shuffle_i32x4(even_top, even_low, 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(odd_top, odd_low, 0x88), rows[i + 12] = _mm512_shuffle_i32x4(odd_top, odd_low, 0xdd);
  }
}
