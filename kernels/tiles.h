// AMX tiles: eight registers of up to 16 rows of 64 bytes. If the compiler does not target AMX and TILES_IN_CPP is
// defined, the same operations are plain C++ with the same bits, so that tile kernels are tested on every machine.
//
// C [rows, 16 columns of 4 bytes] += A [rows, depth of 4 bytes] * B [depth, 16 columns of 4 bytes]. Four bytes are a
// pair of bfloat16 with float32 sums, or four 8-bit integers with integer sums modulo 2^32.
//
// The sum of bfloat16 (Intel SDM, TDPBF16PS) for an output: e = o = +0; for each pair in order e = fma(a[0], b[0], e)
// and o = fma(a[1], b[1], o); then C += e + o. Denormal operands and results are treated as zero; rounding is to
// nearest, ties to even. Therefore zeros at the end of a row do not change the bits of a sum. Storing and reloading a
// sum between two multiplications does not change them either.
#pragma once

#include <cstdint>
#include <immintrin.h>

#if defined(__AMX_TILE__) || defined(TILES_IN_CPP)
#define HAS_TILES
#endif

#ifdef HAS_TILES

constexpr int64_t TILE_ROWS = 16, TILE_ROW_BYTES = 64, TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES;

// The shapes of all eight tiles, in the format of LDTILECFG.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows, int64_t num_bytes) { rows[tile] = num_rows, row_bytes[tile] = num_bytes; }
};

// The tile shapes of a product. Tiles 0 to 3 hold sums of `num_rows` rows. Tile 4 holds activations, `num_rows` rows of
// `depth` bytes. Tiles 6 and 7 hold weights, `depth` bytes of 16 outputs. Tile 5 holds activations if there are 16 rows,
// else weights.
inline TileShapes shapes_of_product(int64_t num_rows, int64_t depth = TILE_ROW_BYTES) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    if (tile < 4)
      shapes.set(tile, num_rows, TILE_ROW_BYTES);
    else if (tile == 4 || (tile == 5 && num_rows == TILE_ROWS))
      shapes.set(tile, num_rows, depth);
    else
      shapes.set(tile, depth / 4, TILE_ROW_BYTES);
  }
  return shapes;
}

// While an object exists, vector instructions also treat denormals as zero.
struct FlushDenormals {
  static constexpr unsigned FLUSH_TO_ZERO = 1 << 15, DENORMALS_ARE_ZERO = 1 << 6;
  const unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO); }
  ~FlushDenormals() { _mm_setcsr(before); }
};

#ifdef __AMX_TILE__

// Compiler intrinsics are not used: in g++ 11 and 12 they do not declare that they read memory, so earlier stores may
// be moved after them.
inline void configure_tiles(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }
template <int T> void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
// Rows are `stride` bytes apart.
template <int T> void load_tile(const void *from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> void store_tile(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B> void multiply_bfloat16_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// A is signed, B is unsigned.
template <int C, int A, int B> void multiply_byte_tiles() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

struct Tiles {
  TileShapes shapes;
  alignas(64) uint8_t bytes[8][TILE_BYTES];
};

inline thread_local Tiles tiles_of_thread;

inline void configure_tiles(const TileShapes &shapes) { tiles_of_thread = {shapes, {}}; }
inline void release_tiles() { tiles_of_thread.shapes.palette = 0; }

// The AMX unit raises an illegal instruction for other shapes and before configure_tiles.
inline void need_tiles(bool fit) {
  if (!fit || tiles_of_thread.shapes.palette != 1) std::abort();
}

inline uint8_t *row_of_tile(int tile, int64_t row) { return tiles_of_thread.bytes[tile] + row * TILE_ROW_BYTES; }

template <int T> void zero_tile() {
  need_tiles(true);
  std::memset(tiles_of_thread.bytes[T], 0, TILE_BYTES);
}

template <int T> void load_tile(const void *from, int64_t stride) {
  zero_tile<T>();
  for (int64_t row = 0; row < tiles_of_thread.shapes.rows[T]; ++row)
    std::memcpy(row_of_tile(T, row), static_cast<const char *>(from) + row * stride, tiles_of_thread.shapes.row_bytes[T]);
}

template <int T> void store_tile(void *to, int64_t stride) {
  need_tiles(true);
  for (int64_t row = 0; row < tiles_of_thread.shapes.rows[T]; ++row)
    std::memcpy(static_cast<char *>(to) + row * stride, row_of_tile(T, row), tiles_of_thread.shapes.row_bytes[T]);
}

// For every output: total = sum(total, depth, row of A, column of B).
template <int C, int A, int B, class Number, class Sum> void multiply_tiles(Sum &&sum) {
  const TileShapes &shapes = tiles_of_thread.shapes;
  const int64_t depth = shapes.row_bytes[A] / 4, columns = shapes.row_bytes[C] / 4;
  need_tiles(shapes.rows[A] == shapes.rows[C] && shapes.rows[B] == depth && shapes.row_bytes[B] == shapes.row_bytes[C]);
  for (int64_t row = 0; row < shapes.rows[C]; ++row)
    for (int64_t column = 0; column < columns; ++column) {
      Number total;
      uint8_t *at = row_of_tile(C, row) + column * 4;
      std::memcpy(&total, at, 4);
      total = sum(total, depth, row_of_tile(A, row), row_of_tile(B, 0) + column * 4);
      std::memcpy(at, &total, 4);
    }
}

inline float bfloat16_at(const uint8_t *at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

template <int C, int A, int B> void multiply_bfloat16_tiles() {
  const FlushDenormals mode;
  multiply_tiles<C, A, B, float>([](float total, int64_t depth, const uint8_t *a, const uint8_t *b) {
    volatile float even = 0, odd = 0;  // volatile, so that nothing is computed before or after the mode is set
    for (int64_t i = 0; i < depth; ++i, a += 4, b += TILE_ROW_BYTES) {
      even = std::fma(bfloat16_at(a), bfloat16_at(b), even);
      odd = std::fma(bfloat16_at(a + 2), bfloat16_at(b + 2), odd);
    }
    const volatile float sum = even + odd;
    return total + sum;
  });
}

template <int C, int A, int B> void multiply_byte_tiles() {
  multiply_tiles<C, A, B, uint32_t>([](uint32_t total, int64_t depth, const uint8_t *a, const uint8_t *b) {
    for (int64_t i = 0; i < depth; ++i, a += 4, b += TILE_ROW_BYTES)
      for (int64_t byte = 0; byte < 4; ++byte) total += static_cast<int8_t>(a[byte]) * b[byte];
    return total;
  });
}

#endif
#endif
