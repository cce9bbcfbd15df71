// What the machine can do at most: bytes read, and products that never leave the registers or, by tiles, the first level of the cache; on
// all threads of the pool.
// Built by tests/bench/matmul.py together with kernels/operator.cpp and threads.cpp.
#include <cstddef>
#include <cstdint>
#include <immintrin.h>

#include "../../kernels/operator.h"
#include "../../kernels/threads.h"
#include "../../kernels/tiles.h"

#define EACH_REGISTER(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define CLEAR(i) __m512i sum##i = _mm512_setzero_si512();
#define DOT_INT8(i) asm volatile("vpdpbusd %1, %1, %0" : "+v"(sum##i) : "v"(x));
#define DOT_BF16(i) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sum##i) : "v"(x));

// Reads `bytes` at `data`, in pieces of 256 KiB by four streams each.
OPERATOR(read_all, (const char *data, int64_t bytes)) {
  constexpr int64_t PIECE = 1 << 18, STREAM = PIECE / 4;
  parallel_for(bytes / PIECE, [&](int64_t piece) {
    __m512i sums[4] = {};
    for (int64_t i = 0; i < STREAM; i += 64)
      for (int s = 0; s < 4; ++s) {
        const char *at = data + piece * PIECE + s * STREAM + i;
        _mm_prefetch(at + 2048, _MM_HINT_T0);
        sums[s] = _mm512_xor_si512(sums[s], _mm512_loadu_si512(at));
      }
    for (auto &sum : sums) asm volatile("" : : "v"(sum));
  });
}

// 12 * `repeats` vpdpbusd (128 operations each) for each of `pieces`
OPERATOR(dot_int8, (int64_t pieces, int64_t repeats)) {
  parallel_for(pieces, [&](int64_t) {
    const __m512i x = _mm512_set1_epi8(1);
    EACH_REGISTER(CLEAR)
    for (int64_t i = 0; i < repeats; ++i) { EACH_REGISTER(DOT_INT8) }
  });
}

// 12 * `repeats` vdpbf16ps (64 operations each) for each of `pieces`
OPERATOR(dot_bfloat16, (int64_t pieces, int64_t repeats)) {
  parallel_for(pieces, [&](int64_t) {
    const __m512i x = _mm512_setzero_si512();
    EACH_REGISTER(CLEAR)
    for (int64_t i = 0; i < repeats; ++i) { EACH_REGISTER(DOT_BF16) }
  });
}

#ifdef HAS_TILES

// 4 * `repeats` products of tiles for each of `pieces`: data [2, 16, 1024], tiles of rows and of outputs. Random ones: the clock falls with
// the bits that change.
template <class Multiply> void multiply_tiles(const char *data, int64_t pieces, int64_t repeats, Multiply &&multiply) {
  parallel_for(pieces, [&](int64_t) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, TILE_ROWS, TILE_ROW_BYTES);
    configure_tiles(shapes);
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int64_t i = 0; i < repeats; ++i) {
      const char *rows = data + i % 8 * 2 * TILE_BYTES, *outputs = rows + 16 * TILE_BYTES;
      load_tile<4>(rows, TILE_ROW_BYTES), load_tile<5>(rows + TILE_BYTES, TILE_ROW_BYTES);
      load_tile<6>(outputs, TILE_ROW_BYTES), load_tile<7>(outputs + TILE_BYTES, TILE_ROW_BYTES);
      multiply();
    }
    release_tiles();
  });
}

// 16,384 operations a product
OPERATOR(tile_bfloat16, (const char *data, int64_t pieces, int64_t repeats)) {
  multiply_tiles(data, pieces, repeats, [] {
    multiply_bfloat16_tiles<0, 4, 6>(), multiply_bfloat16_tiles<1, 4, 7>();
    multiply_bfloat16_tiles<2, 5, 6>(), multiply_bfloat16_tiles<3, 5, 7>();
  });
}

// 32,768 operations a product
OPERATOR(tile_int8, (const char *data, int64_t pieces, int64_t repeats)) {
  multiply_tiles(data, pieces, repeats, [] {
    multiply_byte_tiles<0, 4, 6>(), multiply_byte_tiles<1, 4, 7>(), multiply_byte_tiles<2, 5, 6>(), multiply_byte_tiles<3, 5, 7>();
  });
}

#endif
