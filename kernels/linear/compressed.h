// Lossless bfloat16 in 12 bits, in the layout of kernels/linear/compressed.py: the lower byte, and the index of one of
// 16 upper bytes.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "../simd.h"

constexpr int64_t STEPS_OF_GROUP = 4;  // steps whose bytes are stored together
constexpr int64_t STEPS_OF_PAIR = 2;   // steps that are read together
constexpr int64_t NUMBERS_OF_STEP = 2 * LANES;
constexpr int64_t GROUP_BYTES = STEPS_OF_GROUP * NUMBERS_OF_STEP * 3 / 2;
constexpr int64_t HEADER_BYTES = 64;
constexpr int NUM_UPPER = 16;

struct Exception {  // a number whose upper byte is not in the table
  uint32_t index;   // index in its tile; an end marker with the largest index follows the exceptions of a tile
  uint32_t number;

  int64_t pair() const { return index / (STEPS_OF_PAIR * NUMBERS_OF_STEP); }
};

// The offsets of the parts of a compressed weight.
struct Compressed {
  int64_t num_tiles, num_steps;
  int64_t num_groups = divide_up(num_steps, STEPS_OF_GROUP);  // per tile

  int64_t tile_bytes() const { return num_groups * GROUP_BYTES; }
  int64_t groups(int64_t tile) const { return HEADER_BYTES + tile * tile_bytes(); }
  int64_t start(int64_t tile) const { return groups(num_tiles) + tile * sizeof(uint32_t); }  // of its exceptions
  int64_t exception(int64_t number) const { return start(num_tiles) + number * sizeof(Exception); }
};

// The 16 upper bytes, repeated in each quarter of a register.
inline Ints upper_bytes(const uint8_t *memory) {
  uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = memory[i % NUM_UPPER];
  return load(bytes);
}

inline const Exception *first_exception(const uint8_t *memory, const Compressed &layout, int64_t tile) {
  uint32_t start;
  std::memcpy(&start, memory + layout.start(tile), sizeof start);
  return reinterpret_cast<const Exception *>(memory + layout.exception(start));
}

// Inserts the exceptions of a pair of steps, and advances `next` to the first exception of a later pair.
inline void put_exceptions(const Exception *&next, int64_t pair, Ints (&steps)[STEPS_OF_PAIR]) {
  if (next->pair() != pair) [[likely]] return;
  alignas(64) uint8_t numbers[STEPS_OF_PAIR * 64];
  for (int64_t i = 0; i < STEPS_OF_PAIR; ++i) store(numbers + i * 64, steps[i]);
  for (; next->pair() == pair; ++next)
    std::memcpy(numbers + next->index % (STEPS_OF_PAIR * NUMBERS_OF_STEP) * 2, &next->number, 2);
  for (int64_t i = 0; i < STEPS_OF_PAIR; ++i) steps[i] = load(numbers + i * 64);
}

// Decompresses the first or second pair of steps of a tile's group.
inline void read_pair(const uint8_t *group_bytes, Ints upper_bytes, const Exception *&next, int64_t group, int64_t half, Ints (&steps)[STEPS_OF_PAIR]) {
  const Ints codes = load(group_bytes + 128), lower = load(group_bytes + half * 64);
  const Ints upper = lookup(upper_bytes, bit_and(half ? shift_right<4>(codes) : codes, splat(0x0f0f0f0f)));
  steps[0] = interleave_low(lower, upper), steps[1] = interleave_high(lower, upper);
  put_exceptions(next, group * 2 + half, steps);
}

// Decompresses all steps of a group.
inline void read_group(const uint8_t *group_bytes, Ints upper_bytes, const Exception *&next, int64_t group, Ints (&steps)[STEPS_OF_GROUP]) {
  for (int64_t half = 0; half < 2; ++half) {
    Ints pair[STEPS_OF_PAIR];
    read_pair(group_bytes, upper_bytes, next, group, half, pair);
    steps[2 * half] = pair[0], steps[2 * half + 1] = pair[1];
  }
}

// Decompresses a whole tile.
inline void decompress_tile(const uint8_t *memory, const Compressed &layout, int64_t tile, uint8_t *to) {
  const Ints upper = upper_bytes(memory);
  const Exception *next = first_exception(memory, layout, tile);
  const uint8_t *bytes = memory + layout.groups(tile);
  for (int64_t group = 0; group < layout.num_groups; ++group, bytes += GROUP_BYTES) {
    Ints steps[STEPS_OF_GROUP];
    read_group(bytes, upper, next, group, steps);
    const int64_t count = std::min(STEPS_OF_GROUP, layout.num_steps - group * STEPS_OF_GROUP);
    for (int64_t step = 0; step < count; ++step) store(to, steps[step]), to += 64;
  }
}

// Compresses the steps of a tile into its groups. Returns the exceptions.
inline std::vector<Exception> compress_tile(const Compressed &layout, const uint8_t *upper_bytes, const uint16_t *numbers, uint8_t *groups) {
  std::vector<Exception> exceptions;
  uint8_t codes[256];
  std::fill(codes, codes + 256, NUM_UPPER);
  for (int i = 0; i < NUM_UPPER; ++i) codes[upper_bytes[i]] = i;
  std::fill(groups, groups + layout.tile_bytes(), 0);
  for (int64_t step = 0; step < layout.num_steps; ++step) {
    uint8_t *group = groups + step / STEPS_OF_GROUP * GROUP_BYTES;
    const int64_t pair = step % STEPS_OF_GROUP / 2, odd = step % 2;
    for (int64_t i = 0; i < NUMBERS_OF_STEP; ++i) {
      const uint16_t number = numbers[step * NUMBERS_OF_STEP + i];
      const int64_t byte = i / 8 * 16 + odd * 8 + i % 8;  // the position from which interleave_low and interleave_high restore the order
      const uint8_t code = codes[number >> 8];
      group[pair * 64 + byte] = static_cast<uint8_t>(number);
      group[128 + byte] |= (code % NUM_UPPER) << 4 * pair;
      if (code == NUM_UPPER) exceptions.push_back({static_cast<uint32_t>(step * NUMBERS_OF_STEP + i), number});
    }
  }
  exceptions.push_back({std::numeric_limits<uint32_t>::max(), 0});
  return exceptions;
}
