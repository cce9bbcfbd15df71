// Products with bfloat16 weights on the AMX unit: packed, compressed to 12 bits, or plain.
//
// M rows, K inputs, N outputs. A step is 32 inputs. The step of 16 outputs fills a tile, in the order of
// kernels/linear/float_weight.py, and so does the step of 16 rows. Every output is one sum in the order of steps
// (kernels/tiles.h), so the bits of a row depend neither on other rows nor on how threads share the work.
#include "../tiles.h"

#ifdef HAS_TILES

#include <algorithm>
#include <vector>

#include "../aligned_buffer.h"
#include "bfloat16_steps.h"
#include "compressed.h"

namespace {

struct Job {
  Product product;
  char *panels = nullptr;  // the rows: [tiles of 16 rows, steps, 16 rows, 64 bytes]; fewer rows are contiguous

  const Rows &rows() const { return product.rows; }
  bool has_few_rows() const { return rows().num_rows <= TILE_ROWS; }
  int64_t num_pairs() const { return divide_up(rows().num_inputs, 2); }
  int64_t num_steps() const { return divide_up(rows().num_inputs, INPUTS_OF_STEP); }
  int64_t num_panels() const { return divide_up(rows().num_rows, TILE_ROWS); }
  int64_t height() const { return std::min(rows().num_rows, TILE_ROWS); }  // rows per panel; the last panel is padded with zeros
  int64_t step_bytes() const { return height() * TILE_ROW_BYTES; }
  int64_t num_fills() const { return num_panels(); }
  int64_t panels_of_chunk() const { return ROW_TILES_OF_CHUNK; }
  int64_t tiles_of_chunk() const {
    const int64_t chunks = product.num_chunks(MAX_TILES_OF_CHUNK) * divide_up(num_panels(), ROW_TILES_OF_CHUNK);
    return has_few_rows() || chunks < 4 * get_threads() ? TILES_OF_CHUNK : MAX_TILES_OF_CHUNK;
  }
  int64_t panel_bytes() const { return num_panels() * num_steps() * step_bytes() + ALIGNMENT; }
  void assign_memory(char *memory) { panels = aligned(memory); }
  char *panel(int64_t number) const { return panels + number * num_steps() * step_bytes(); }
};

void fill_panel(const Job &job, int64_t panel) {
  const Rows &rows = job.rows();
  const int64_t first = panel * TILE_ROWS, row_bytes = rows.num_inputs * 2, step_bytes = job.step_bytes();
  for (int64_t row = 0; row < job.height(); ++row) {
    char *to = job.panel(panel) + row * TILE_ROW_BYTES;
    const int64_t present = first + row < rows.num_rows ? row_bytes : 0;
    const char *from = static_cast<const char *>(rows.x) + (first + row) * row_bytes;
    for (int64_t byte = 0; byte < row_bytes; byte += TILE_ROW_BYTES, to += step_bytes)
      store(reinterpret_cast<uint8_t *>(to), load_part(from + byte, present - byte));
  }
}

// Reads one tile of outputs, block after block.
struct Reader {
  const uint8_t *memory;  // of the tile
  Prefetcher prefetcher;
  int64_t num_pairs;
  bool is_compressed;
  Ints upper;
  const Exception *next;

  // num_tiles: the tiles that are read alternately.
  void begin(const Job &job, const Output &out, const Weight &weight, int64_t tile, int64_t num_tiles) {
    num_pairs = job.num_pairs(), is_compressed = weight.is_compressed;
    const Compressed layout{out.num_tiles(), num_pairs};
    const int64_t tile_bytes = is_compressed ? layout.tile_bytes() : num_pairs * PAIR_BYTES;
    if (is_compressed)
      memory = weight.memory + layout.groups(tile), upper = upper_bytes(weight.memory), next = first_exception(weight.memory, layout, tile);
    else
      memory = weight.memory + (tile - weight.first_tile) * tile_bytes;
    prefetcher = {memory, tile_bytes, num_tiles};
  }

  // Whether steps first to first + count - 1 are stored in the weight in the form that tile loads need.
  bool is_loadable(int64_t first, int64_t count) const { return !is_compressed && (first + count) * TILE_ROWS <= num_pairs; }
  const uint8_t *at(int64_t step) const { return memory + step * TILE_BYTES; }

  // Writes four pairs, 256 bytes, with zeros after the last input.
  void expand(int64_t group, uint8_t *to) {
    const int64_t present = std::clamp<int64_t>(num_pairs - group * STEPS_OF_GROUP, 0, STEPS_OF_GROUP);
    if (is_compressed && present > 0) {
      Ints pairs[STEPS_OF_GROUP];
      read_pairs<true>(group, pairs);
      UNROLL
      for (int64_t pair = 0; pair < STEPS_OF_GROUP; ++pair) store(to + pair * PAIR_BYTES, pairs[pair]);
    } else if (present > 0) {
      std::memcpy(to, memory + group * STEPS_OF_GROUP * PAIR_BYTES, present * PAIR_BYTES);
    }
    if (present < STEPS_OF_GROUP) [[unlikely]] std::fill(to + present * PAIR_BYTES, to + STEPS_OF_GROUP * PAIR_BYTES, 0);
  }

  // Reads four pairs. Pairs after the last input are not zero.
  template <bool COMPRESSED> void read_pairs(int64_t group, Ints (&pairs)[STEPS_OF_GROUP]) {
    constexpr int64_t BYTES = COMPRESSED ? GROUP_BYTES : STEPS_OF_GROUP * PAIR_BYTES;
    const uint8_t *from = memory + group * BYTES;
    prefetcher.fetch<BYTES>(from);
    if constexpr (COMPRESSED) {
      read_group(from, upper, next, group, pairs);
    } else {
      UNROLL
      for (int64_t pair = 0; pair < STEPS_OF_GROUP; ++pair)
        pairs[pair] = group * STEPS_OF_GROUP + pair < num_pairs ? load(from + pair * PAIR_BYTES) : splat(0);
    }
  }
};

// Computes sums [rows, COLUMNS, 16].
template <int COLUMNS> void multiply_few(const Job &job, const Output &out, const Weight &weight, int64_t tile, float *sums) {
  Reader readers[COLUMNS];
  for (int t = 0; t < COLUMNS; ++t) readers[t].begin(job, out, weight, tile + t, COLUMNS);
  if (job.rows().num_rows > 1) return stream<Bfloat16Unit, COLUMNS>(job, readers, sums);
  const auto multiply = [&]<bool COMPRESSED>() {
    multiply_row<COLUMNS>(job, job.num_pairs(), sums, [&](int64_t t, int64_t group, Ints (&pairs)[PAIRS_OF_QUARTER]) {
      readers[t].template read_pairs<COMPRESSED>(group, pairs);
    });
  };
  weight.is_compressed ? multiply.template operator()<true>() : multiply.template operator()<false>();
}

void multiply_few_rows(const Job &job, const Output &out, int64_t first, int64_t last) {
  alignas(64) float result[TILE_ROWS * TILES_OF_CHUNK * LANES], up[TILE_ROWS * TILES_OF_CHUNK * LANES];
  const int64_t num_rows = job.rows().num_rows;
  configure_tiles(shapes_of_product(num_rows));
  for (int64_t tile = first; tile < last;) {
    const int64_t num_tiles = tile + TILES_OF_CHUNK <= last ? TILES_OF_CHUNK : 1, width = num_tiles * LANES;
    const int64_t count = std::min(width, out.num_outputs - tile * LANES);
    const auto compute = [&](const Weight &weight, float *sums) {
      (num_tiles == 1 ? multiply_few<1> : multiply_few<TILES_OF_CHUNK>)(job, out, weight, tile, sums);
      if (weight.bias) add_bias(weight, Dtype::bfloat16, num_rows, tile, num_tiles, count, sums);
    };
    compute(out.weight, result);
    if (out.up.memory) compute(out.up, up);
    write_rows(out, Dtype::bfloat16, 0, num_rows, tile, count, width, result, out.up.memory ? up : nullptr);
    tile += num_tiles;
  }
  release_tiles();
}

void multiply_many_rows(const Job &job, const Output &out, const WorkItem &item) {
  thread_local std::vector<float> buffers[2];
  const int64_t first_row = item.first_panel * TILE_ROWS, num_rows = std::min(item.last_panel * TILE_ROWS, job.rows().num_rows) - first_row;
  const int64_t num_tiles = item.last_tile - item.first_tile, width = num_tiles * LANES, tile = item.first_tile;
  const int64_t count = std::min(width, out.num_outputs - tile * LANES);
  const auto compute = [&](const Weight &weight, std::vector<float> &memory) {
    float *sums = aligned_buffer(memory, (item.last_panel - item.first_panel) * TILE_ROWS * width);
    Reader readers[MAX_TILES_OF_CHUNK];
    for (int64_t t = 0; t < num_tiles; ++t) readers[t].begin(job, out, weight, tile + t, num_tiles);
    multiply_many<Bfloat16Unit>(job, readers, item, sums);
    if (weight.bias) add_bias(weight, Dtype::bfloat16, num_rows, tile, num_tiles, count, sums);
    return sums;
  };
  configure_tiles(shapes_of_product(TILE_ROWS));
  float *result = compute(out.weight, buffers[0]), *up = out.up.memory ? compute(out.up, buffers[1]) : nullptr;
  release_tiles();
  write_rows(out, Dtype::bfloat16, first_row, num_rows, tile, count, width, result, up);
}

// Plain weights are packed first.
void multiply_item(const Job &job, const WorkItem &item) {
  Output out = *item.out;
  if (job.product.plain.numbers) {
    thread_local std::vector<uint8_t> packed;
    const int64_t tile_bytes = job.num_pairs() * PAIR_BYTES;
    uint8_t *memory = aligned_buffer(packed, (item.last_tile - item.first_tile) * tile_bytes);
    for (int64_t tile = item.first_tile; tile < item.last_tile; ++tile) {
      uint8_t *to = memory + (tile - item.first_tile) * tile_bytes;
      pack_tile<Dtype::bfloat16>(job.product.plain, out.num_outputs, job.rows().num_inputs, tile, to);
    }
    out.weight.memory = memory, out.weight.first_tile = item.first_tile;
  }
  if (job.has_few_rows())
    multiply_few_rows(job, out, item.first_tile, item.last_tile);
  else
    multiply_many_rows(job, out, item);
}

}  // namespace

void multiply_bfloat16_weights_by_tiles(const std::vector<Product> &products) {
  thread_local std::vector<Job> jobs;
  jobs.clear();
  for (const Product &product : products) jobs.push_back({product});
  run(jobs, fill_panel, multiply_item);
}

#endif
