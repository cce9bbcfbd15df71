// Packs ggml's blocks, as they are in a file, into the form that kernels read. kernels/linear/block_weight.py defines
// both layouts.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "../operator.h"
#include "../threads.h"
#include "block_weight.h"
#include "products.h"

namespace {

constexpr int64_t SPAN = 2 * UNIT;  // codes of one output in a register, a byte each
constexpr int64_t BLOCKS_OF_CHUNK = 1 << 12;  // blocks whose factors justify another thread
constexpr uint16_t EXPONENT = 0x7c00;         // bits of a float16, all set in infinity and NaN

// A block in a file: factors, scales and codes, without padding.
template <class Kind> struct FileBlock {
  static constexpr int64_t parts = 1 + Kind::has_minimums, groups = Kind::has_scales ? Kind::block / Kind::group : 0;
  static constexpr int64_t code_bytes = Kind::block * Kind::bits / 8;
  static constexpr int64_t scale_bytes = !Kind::has_scales ? 0 : Kind::has_indices ? 6 : Kind::bits == 6 ? 16 : 12;
  static constexpr int64_t factor_bytes = Kind::is_fp4 ? Kind::factors_bytes / LANES : 2;  // of a part
  static constexpr int64_t bytes = factor_bytes * parts + scale_bytes + code_bytes;
  // The factor of a Q3_K or Q6_K block is at its end.
  static constexpr int64_t factors_at = Kind::has_scales && !Kind::has_minimums && !Kind::has_indices ? bytes - 2 : 0;
};

// Reads the codes of a file's block, a byte each.
template <class Kind> void read_codes(const uint8_t *block, uint8_t *codes) {
  using File = FileBlock<Kind>;
  if constexpr (Kind::bits == 8) {
    for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 128;
  } else if constexpr (Kind::is_fp4) {
    constexpr int64_t HALF = Kind::group / 2;
    const uint8_t *low = block + File::factor_bytes;
    for (int64_t group = 0; group < Kind::block / Kind::group; ++group, low += HALF, codes += Kind::group)
      for (int i = 0; i < HALF; ++i) codes[i] = low[i] & 15, codes[HALF + i] = low[i] >> 4;
  } else if constexpr (Kind::has_scales && Kind::has_indices) {
    const uint8_t *low = block + 8;
    for (int group = 0; group < 8; ++group, low += 16, codes += 32)
      for (int i = 0; i < 16; ++i) codes[i] = low[i] & 15, codes[16 + i] = low[i] >> 4;
  } else if constexpr (!Kind::has_scales) {
    static_assert(Kind::bits == 4 || Kind::bits == 5);
    const uint8_t *low = block + File::bytes - 16;
    for (int i = 0; i < 16; ++i) codes[i] = low[i] & 15, codes[16 + i] = low[i] >> 4;
    if constexpr (Kind::bits == 5) {
      uint32_t high;
      std::memcpy(&high, low - 4, 4);
      for (int i = 0; i < 32; ++i) codes[i] |= (high >> i & 1) << 4;
    }
  } else if constexpr (Kind::has_minimums) {
    static_assert(Kind::bits == 4 || Kind::bits == 5);
    const uint8_t *high = block + 4 + File::scale_bytes, *low = block + File::bytes - 128;
    for (int group = 0; group < 8; group += 2, low += 32, codes += 64)
      for (int i = 0; i < 32; ++i) {
        codes[i] = low[i] & 15, codes[32 + i] = low[i] >> 4;
        if constexpr (Kind::bits == 5) codes[i] |= (high[i] >> group & 1) << 4, codes[32 + i] |= (high[i] >> (group + 1) & 1) << 4;
      }
  } else if constexpr (Kind::bits == 6) {
    const uint8_t *low = block, *high = block + 128;
    for (int half = 0; half < 2; ++half, low += 64, high += 32, codes += 128)
      for (int i = 0; i < 32; ++i) {
        codes[i] = (low[i] & 15) | (high[i] & 3) << 4, codes[32 + i] = (low[32 + i] & 15) | (high[i] >> 2 & 3) << 4;
        codes[64 + i] = low[i] >> 4 | (high[i] >> 4 & 3) << 4, codes[96 + i] = low[32 + i] >> 4 | high[i] >> 6 << 4;
      }
  } else {
    static_assert(Kind::bits == 3);
    const uint8_t *high = block, *low = block + 32;
    for (int half = 0; half < 2; ++half, low += 32)
      for (int quarter = 0; quarter < 4; ++quarter, codes += 32)
        for (int i = 0; i < 32; ++i) codes[i] = (low[i] >> 2 * quarter & 3) | (high[i] >> (4 * half + quarter) & 1) << 2;
  }
}

// Reads the scales of a file's block, then its minimums, into every LANES-th byte. Signed scales of six bits are as in
// the file, plus 32.
template <class Kind> void read_scales(const uint8_t *block, uint8_t *scales) {
  if constexpr (Kind::bits == 6) {
    for (int i = 0; i < 16; ++i) scales[i * LANES] = block[192 + i];
  } else if constexpr (Kind::has_indices) {
    for (int i = 0; i < 8; ++i) {
      const int lower = block[4 + i / 2] >> i % 2 * 4 & 15, upper = block[2 + i / 4] >> i % 4 * 2 & 3;
      scales[i * LANES] = static_cast<uint8_t>((lower | upper << 4) - SCALE_OFFSET);
    }
  } else if constexpr (Kind::has_minimums) {
    const uint8_t *packed = block + 4;
    uint8_t *minimums = scales + 8 * LANES;
    for (int i = 0; i < 4; ++i) {
      const uint8_t scale = packed[i], minimum = packed[4 + i], rest = packed[8 + i];
      scales[i * LANES] = scale & 63, scales[(4 + i) * LANES] = (rest & 15) | scale >> 6 << 4;
      minimums[i * LANES] = minimum & 63, minimums[(4 + i) * LANES] = rest >> 4 | minimum >> 6 << 4;
    }
  } else {
    static_assert(Kind::scale_bits == 6);
    const uint8_t *packed = block + 96;
    for (int i = 0; i < 8; ++i) {
      const int upper = packed[8 + i % 4] >> i / 4 * 2;
      scales[i * LANES] = (packed[i] & 15) | (upper & 3) << 4, scales[(8 + i) * LANES] = packed[i] >> 4 | (upper >> 4 & 3) << 4;
    }
  }
}

template <class Kind> void read_factors(const uint8_t *block, uint16_t *factors) {
  for (int64_t part = 0; part < FileBlock<Kind>::parts; ++part) {
    std::memcpy(factors + part * LANES, block + FileBlock<Kind>::factors_at + 2 * part, 2);
    if (part == 1 && !Kind::has_scales) factors[LANES] ^= 0x8000;
  }
}

// Joins four vectors of six-bit numbers to three.
inline void store_six_bits(const Ints (&numbers)[4], uint8_t *to) {
  const Ints last = numbers[3];
  store(to, bit_xor(numbers[0], shift_left<6>(bits_of<0, 3>(last))));
  store(to + VECTOR_BYTES, bit_xor(numbers[1], shift_left<6>(bits_of<2, 3>(last))));
  store(to + 2 * VECTOR_BYTES, bit_xor(numbers[2], shift_left<6>(bits_of<4, 3>(last))));
}

// Writes the factors and scales of a block of `num_rows` outputs. The file's rows are `row_bytes` apart.
template <class Kind> void pack_head(const uint8_t *block, int64_t row_bytes, int64_t num_rows, uint8_t *packed) {
  using File = FileBlock<Kind>;
  if constexpr (Kind::is_fp4) {
    std::memset(packed, 0, Kind::head_bytes);
    for (int64_t row = 0; row < num_rows; ++row, block += row_bytes)
      for (int64_t group = 0; group < File::factor_bytes; ++group) packed[group * LANES + row] = block[group];
    return;
  }
  uint16_t factors[File::parts * LANES] = {};
  alignas(64) uint8_t scales[std::max<int64_t>(File::parts * File::groups, 1) * LANES];
  std::memset(scales, Kind::scale_bits == 6 ? SCALE_OFFSET : 0, sizeof scales);
  for (int64_t row = 0; row < num_rows; ++row, block += row_bytes) {
    read_factors<Kind>(block, factors + row);
    if constexpr (Kind::has_scales) read_scales<Kind>(block, scales + row);
  }
  std::memcpy(packed, factors, sizeof factors);
  uint8_t *to = packed + sizeof factors;
  if constexpr (Kind::scale_bits == 6)
    store_six_bits({load(scales), load(scales + VECTOR_BYTES), load(scales + 2 * VECTOR_BYTES), load(scales + 3 * VECTOR_BYTES)}, to);
  else
    std::memcpy(to, scales, Kind::head_bytes - sizeof factors);
}

// Writes the codes of a unit. steps: four codes of each output.
template <class Kind> void pack_unit(const Ints *steps, uint8_t *unit) {
  if constexpr (Kind::bits == 3) {
    Ints pairs[4];
    for (int i = 0; i < 4; ++i) pairs[i] = bit_xor(steps[2 * i], shift_left<3>(steps[2 * i + 1]));
    return store_six_bits(pairs, unit);
  }
  if constexpr (Kind::bits == 8) {
    for (int i = 0; i < UNIT_STEPS; ++i, unit += VECTOR_BYTES) store(unit, steps[i]);
    return;
  }
  for (int i = 0; i < 4; ++i, unit += VECTOR_BYTES)
    store(unit, bit_xor(bits_of<0, 15>(steps[2 * i]), shift_left<4>(bits_of<0, 15>(steps[2 * i + 1]))));
  constexpr int REST = Kind::bits % 8 - 4, STEPS = REST > 0 ? 8 / REST : 0;
  UNROLL
  for (int i = 0; i < REST; ++i, unit += VECTOR_BYTES) {
    Ints joined = splat(0);
    UNROLL
    for (int step = 0; step < STEPS; ++step)
      joined = bit_xor(joined, shifted(bit_and(steps[i * STEPS + step], splat(0x30303030)), REST * step - 4));
    store(unit, joined);
  }
}

// Packs 16 outputs, or the last `num_rows` ones.
template <class Kind> void pack_tile(const uint8_t *rows, int64_t num_rows, int64_t num_blocks, uint8_t *packed) {
  constexpr int64_t AT_ONCE = std::max<int64_t>(SPAN / Kind::block, 1), BYTES = FileBlock<Kind>::bytes;
  const int64_t row_bytes = num_blocks * BYTES;
  alignas(64) uint8_t codes[LANES][AT_ONCE * Kind::block] = {};
  for (int64_t block = 0; block < num_blocks; block += AT_ONCE) {
    const int64_t count = std::min(AT_ONCE, num_blocks - block);
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t *from = rows + (block + i) * BYTES;
      pack_head<Kind>(from, row_bytes, num_rows, packed + i * Kind::block_bytes);
      for (int64_t row = 0; row < num_rows; ++row) read_codes<Kind>(from + row * row_bytes, codes[row] + i * Kind::block);
    }
    for (int64_t first = 0; first < count * Kind::block; first += SPAN) {
      Ints steps[LANES];
      for (int64_t row = 0; row < LANES; ++row) steps[row] = load(codes[row] + first);
      transpose(steps);
      for (int64_t input = first; input < std::min(first + SPAN, count * Kind::block); input += UNIT) {
        uint8_t *to = packed + input / Kind::block * Kind::block_bytes + Kind::head_bytes;
        pack_unit<Kind>(steps + (input - first) / STEP, to + input % Kind::block / UNIT * Kind::unit_bytes);
      }
    }
    packed += count * Kind::block_bytes;
  }
}

}  // namespace

// Whether a factor is infinite or NaN, or a negative float8, which ggml stores without a sign.
template <class Kind> bool is_special(const uint8_t *block, int64_t part) {
  using File = FileBlock<Kind>;
  if constexpr (Kind::is_fp4)
    return std::any_of(block, block + File::factor_bytes, [](uint8_t byte) { return byte >= (Kind::has_global_scale ? 0x7f : 0xff); });
  uint16_t factor;
  std::memcpy(&factor, block + File::factors_at + 2 * part, 2);
  return (factor & EXPONENT) == EXPONENT;
}

// are_finite: true, and false afterwards if a factor of the blocks of a file is special.
OPERATOR(check_factors, (const uint8_t *blocks, Codes codes, int64_t num_blocks, bool *are_finite)) {
  with_kind(codes, [&](auto kind) {
    using File = FileBlock<decltype(kind)>;
    parallel_for(divide_up(num_blocks, BLOCKS_OF_CHUNK), [&](int64_t chunk) {
      bool any = false;
      for (int64_t block = chunk * BLOCKS_OF_CHUNK; block < std::min((chunk + 1) * BLOCKS_OF_CHUNK, num_blocks); ++block)
        for (int64_t part = 0; part < File::parts; ++part) any |= is_special<decltype(kind)>(blocks + block * File::bytes, part);
      if (any) std::atomic_ref(*are_finite).store(false, std::memory_order_relaxed);
    });
  });
}

// blocks: [outputs, bytes] as in a file. memory: of a BlockWeight.
OPERATOR(pack_blocks, (const uint8_t *blocks, Codes codes, int64_t num_outputs, int64_t num_inputs, uint8_t *memory)) {
  with_kind(codes, [&](auto kind) {
    using Kind = decltype(kind);
    const int64_t num_blocks = num_inputs / Kind::block;
    parallel_for(divide_up(num_outputs, LANES), [&](int64_t tile) {
      const int64_t first = tile * LANES;
      const uint8_t *rows = blocks + first * num_blocks * FileBlock<Kind>::bytes;
      pack_tile<Kind>(rows, std::min(LANES, num_outputs - first), num_blocks, memory + tile * num_blocks * Kind::block_bytes);
    });
  });
}
