// Vectors of 16 lanes: one register with AVX-512, a pair of registers with AVX2, so that a kernel is written once.
// Results may differ between the instruction sets, but never within one: each function is a fixed order of operations.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

constexpr int64_t LANES = 16;

// Arrays of vectors stay in registers only if the loops over them are unrolled. Without this pragma the compiler does
// not unroll loops of 24 iterations.
#define UNROLL _Pragma("GCC unroll 24")

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifdef __AVX512F__
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif
