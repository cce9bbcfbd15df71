// Vectors of 16 lanes: one register under AVX-512, a pair of them under AVX2, so that a kernel is written once.
// Results may differ between the two instruction sets, never within one: each function is a fixed order of operations.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

constexpr int64_t LANES = 16;

// Vectors in an array stay in registers only if the loops over them are unrolled, which the compiler does not do unasked for as many as 24.
#define UNROLL _Pragma("GCC unroll 24")

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifdef __AVX512F__
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif
