// Code shared by tile products for all formats of weights.
#pragma once

#include <algorithm>

#include "../tiles.h"
#include "products.h"

namespace {

constexpr int64_t ROW_TILES_OF_CHUNK = 16;  // 256 rows: their part of a block fills a quarter of the L2 cache
constexpr int64_t BLOCK_STEPS = 32;         // steps of a weight per block; all rows of a chunk are multiplied by it in turn
constexpr int64_t STEPS_OF_STORE = 4;       // interval of stores: after 2,150 cycles without a store, the next takes 700 cycles longer
constexpr int64_t QUARTER = TILE_BYTES / 4;
constexpr int64_t PREFETCH_BYTES = 8192;    // distance of prefetches into the L2 cache

// Some steps of up to four tiles of outputs, [tile, steps, 1024 bytes]. A block is read in quarters of a step during the
// products of the previous block, because vector instructions run while the AMX unit multiplies.
template <class Reader> struct Block {
  const uint8_t *tiles[TILES_OF_CHUNK];
  Reader *readers;
  uint8_t *memory;
  int64_t num_tiles, first_quarter, num_quarters;  // quarters of steps, per tile
  int64_t tile, quarter;                           // the next to be read
  bool is_in_place;  // whether tiles are loaded from the weight itself, without a copy in `memory`

  void begin(Reader *first_reader, int64_t count, int64_t first_step, int64_t num_steps, uint8_t *to) {
    readers = first_reader, memory = to, num_tiles = count, first_quarter = first_step * 4, num_quarters = num_steps * 4;
    is_in_place = readers[0].is_loadable(first_step, num_steps);
    for (int64_t t = 0; t < num_tiles; ++t) tiles[t] = is_in_place ? readers[t].at(first_step) : memory + t * num_steps * TILE_BYTES;
    tile = quarter = 0;
  }

  void read_quarter() {
    if (tile == num_tiles) return;
    Reader &reader = readers[tile];
    const int64_t index = first_quarter + quarter;
    if (is_in_place)
      reader.prefetcher.template fetch<QUARTER>(reader.at(0) + index * QUARTER);
    else
      reader.expand(index, memory + (tile * num_quarters + quarter) * QUARTER);
    if (++quarter == num_quarters) quarter = 0, ++tile;
  }

  void read_all() {
    while (tile != num_tiles) read_quarter();
  }
};

// Prefetches PREFETCH_BYTES ahead in a reader's tile, and near the end of the tile in the tiles that are read next.
// Addresses are integers, because C++ does not define pointers outside of their arrays.
struct Prefetcher {
  uintptr_t near_end;
  int64_t skipped;

  // num_tiles: the tiles that are read alternately, this tile included.
  Prefetcher() = default;
  Prefetcher(const uint8_t *tile, int64_t tile_bytes, int64_t num_tiles)
      : near_end(reinterpret_cast<uintptr_t>(tile) + tile_bytes - PREFETCH_BYTES), skipped((num_tiles - 1) * tile_bytes) {}
  template <int64_t BYTES = 64> void fetch(const uint8_t *at) const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(at);
    const uintptr_t target = address + PREFETCH_BYTES + (address < near_end ? 0 : skipped);
    UNROLL
    for (int64_t byte = 0; byte < BYTES; byte += 64) _mm_prefetch(reinterpret_cast<const char *>(target + byte), _MM_HINT_T1);
  }
};

// --- a block of sums: ROWS tiles of rows times COLUMNS tiles of outputs, at most 2 x 2 or 1 x 4, in AMX tiles 0 to 3
// ---

template <int ROWS, int COLUMNS> void begin_sums(const char *sums, int64_t stride, bool are_new) {
  static_assert(ROWS * COLUMNS <= 4);
  if (are_new) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    return;
  }
  load_tile<0>(sums, stride);
  if constexpr (COLUMNS > 1) load_tile<1>(sums + TILE_ROW_BYTES, stride);
  if constexpr (COLUMNS > 2) load_tile<2>(sums + 2 * TILE_ROW_BYTES, stride), load_tile<3>(sums + 3 * TILE_ROW_BYTES, stride);
  if constexpr (ROWS > 1) load_tile<COLUMNS>(sums + TILE_ROWS * stride, stride);
  if constexpr (ROWS > 1 && COLUMNS > 1) load_tile<3>(sums + TILE_ROWS * stride + TILE_ROW_BYTES, stride);
}

template <int ROWS, int COLUMNS> void end_sums(char *sums, int64_t stride) {
  store_tile<0>(sums, stride);
  if constexpr (COLUMNS > 1) store_tile<1>(sums + TILE_ROW_BYTES, stride);
  if constexpr (COLUMNS > 2) store_tile<2>(sums + 2 * TILE_ROW_BYTES, stride), store_tile<3>(sums + 3 * TILE_ROW_BYTES, stride);
  if constexpr (ROWS > 1) store_tile<COLUMNS>(sums + TILE_ROWS * stride, stride);
  if constexpr (ROWS > 1 && COLUMNS > 1) store_tile<3>(sums + TILE_ROWS * stride + TILE_ROW_BYTES, stride);
}

// x: the first tile of rows, with a stride of `step_bytes` between steps; the second tile is `panel_bytes` after it.
// It also reads quarters of the block `next_block`.
template <class Unit, int ROWS, int COLUMNS, class Reader>
[[gnu::noinline]] void add_steps(const char *x, int64_t step_bytes, int64_t panel_bytes, const uint8_t *const *weight, int64_t num_steps,
                                 Block<Reader> &next_block) {
  alignas(64) thread_local uint8_t never_read[TILE_BYTES];
  for (int64_t step = 0; step < num_steps; ++step, x += step_bytes) {
    const int64_t at = step * TILE_BYTES;
    load_tile<4>(x, TILE_ROW_BYTES);
    load_tile<6>(weight[0] + at, TILE_ROW_BYTES);
    Unit::template multiply<0, 4, 6>();
    if constexpr (COLUMNS > 1) load_tile<7>(weight[1] + at, TILE_ROW_BYTES), Unit::template multiply<1, 4, 7>();
    if constexpr (COLUMNS > 2) load_tile<5>(weight[2] + at, TILE_ROW_BYTES), Unit::template multiply<2, 4, 5>();
    if constexpr (COLUMNS > 2) load_tile<6>(weight[3] + at, TILE_ROW_BYTES), Unit::template multiply<3, 4, 6>();
    if constexpr (ROWS > 1) load_tile<5>(x + panel_bytes, TILE_ROW_BYTES), Unit::template multiply<COLUMNS, 5, 6>();
    if constexpr (ROWS > 1 && COLUMNS > 1) Unit::template multiply<3, 5, 7>();
    next_block.read_quarter();
    if (step % STEPS_OF_STORE == STEPS_OF_STORE - 1) store_tile<7>(never_read, TILE_ROW_BYTES);
  }
}

// Multiplies few rows, one tile, while the weight streams by: sums [rows, COLUMNS, 16].
template <class Unit, int COLUMNS, class Job, class Reader, class Number> void stream(const Job &job, Reader *readers, Number *sums) {
  alignas(64) thread_local uint8_t scratch[2][TILES_OF_CHUNK][TILE_BYTES];
  begin_sums<1, COLUMNS>(nullptr, 0, true);
  Block<Reader> block{}, no_block{};
  for (int64_t step = 0; step < job.num_steps(); ++step) {
    block.begin(readers, COLUMNS, step, 1, scratch[step % 2][0]);
    block.read_all();
    add_steps<Unit, 1, COLUMNS>(job.panel(0) + step * job.step_bytes(), job.step_bytes(), 0, block.tiles, 1, no_block);
  }
  end_sums<1, COLUMNS>(reinterpret_cast<char *>(sums), COLUMNS * TILE_ROW_BYTES);
}

// Memory of this thread for two blocks of two tiles each.
inline uint8_t *memory_of_block(int64_t number) {
  alignas(64) thread_local uint8_t memory[2][2 * BLOCK_STEPS * TILE_BYTES];
  return memory[number % 2];
}

// Processes the weight's tiles in pairs, some steps at a time. Each block is read while the previous block is
// multiplied: work(block, tile, num_tiles, step, num_steps, next_block).
template <class Reader, class Work>
void for_each_block(Reader *readers, int64_t num_tiles, int64_t num_steps, int64_t steps_of_block, Work &&work) {
  const int64_t num_pairs = divide_up(num_tiles, 2), num_blocks = divide_up(num_steps, steps_of_block) * num_pairs;
  Block<Reader> blocks[2]{};
  const auto tile = [&](int64_t number) { return number % num_pairs * 2; };
  const auto step = [&](int64_t number) { return number / num_pairs * steps_of_block; };
  const auto width = [&](int64_t number) { return std::min<int64_t>(2, num_tiles - tile(number)); };
  const auto count = [&](int64_t number) { return std::min(steps_of_block, num_steps - step(number)); };
  const auto begin = [&](int64_t number) {
    blocks[number % 2].begin(readers + tile(number), width(number), step(number), count(number), memory_of_block(number));
  };
  begin(0);
  for (int64_t number = 0; number < num_blocks; ++number) {
    blocks[number % 2].read_all();
    if (number + 1 < num_blocks) begin(number + 1);
    work(blocks[number % 2], tile(number), width(number), step(number), count(number), blocks[(number + 1) % 2]);
  }
}

// Multiplies many rows. Up to 256 rows share a block read from the weight: sums [rows of the item's panels, tiles of
// the item, 16].
template <class Unit, class Job, class Reader, class Number>
void multiply_many(const Job &job, Reader *readers, const WorkItem &item, Number *sums) {
  const int64_t num_tiles = item.last_tile - item.first_tile, stride = num_tiles * TILE_ROW_BYTES;
  if (job.num_steps() == 0) std::fill_n(sums, (item.last_panel - item.first_panel) * TILE_ROWS * num_tiles * LANES, Number{});
  for_each_block(readers, num_tiles, job.num_steps(), BLOCK_STEPS,
                 [&](const Block<Reader> &block, int64_t tile, int64_t width, int64_t step, int64_t count, Block<Reader> &next_block) {
    const auto multiply = [&]<int ROWS, int COLUMNS>(int64_t panel) {
      char *to = reinterpret_cast<char *>(sums) + (panel - item.first_panel) * TILE_ROWS * stride + tile * TILE_ROW_BYTES;
      begin_sums<ROWS, COLUMNS>(to, stride, step == 0);
      const char *x = job.panel(panel) + step * job.step_bytes();
      add_steps<Unit, ROWS, COLUMNS>(x, job.step_bytes(), job.panel(1) - job.panel(0), block.tiles, count, next_block);
      end_sums<ROWS, COLUMNS>(to, stride);
    };
    for (int64_t panel = item.first_panel; panel < item.last_panel; panel += 2) {
      const bool two_panels = panel + 1 < item.last_panel;
      if (width == 2)
        two_panels ? multiply.template operator()<2, 2>(panel) : multiply.template operator()<1, 2>(panel);
      else
        two_panels ? multiply.template operator()<2, 1>(panel) : multiply.template operator()<1, 1>(panel);
    }
  });
}

}  // namespace
