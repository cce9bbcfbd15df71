// Products with float8 weights on the AMX unit, for rows of bfloat16 or float8. All operands are exact in bfloat16.
//
// M rows, K inputs, N outputs, G groups of inputs. A step is 32 inputs of one group, padded with zeros. Every group is
// one sum in the order of steps (kernels/tiles.h). Groups are scaled and added in float32 in order, with one rounding
// each. So the bits of a row depend neither on other rows nor on how threads share the work.
#include "../tiles.h"

#ifdef HAS_TILES

#include <algorithm>
#include <vector>

#include "../aligned_buffer.h"
#include "bfloat16_steps.h"
#include "float8.h"

namespace {

constexpr int64_t VECTOR_BYTES = 64, INPUTS_OF_VECTOR = 4;  // of codes
constexpr int64_t VECTORS_OF_QUARTER = 2;

struct Job {
  Product product;
  int64_t group_size;
  char *panels = nullptr;  // the rows: [tiles of 16 rows, steps, 16 rows, 64 bytes]; fewer rows are contiguous
  float *scales = nullptr;  // [M, G]

  const Rows &rows() const { return product.rows; }
  bool has_few_rows() const { return rows().num_rows <= TILE_ROWS; }
  int64_t num_groups() const { return rows().num_inputs / group_size; }
  int64_t steps_of_group() const { return divide_up(group_size, INPUTS_OF_STEP); }
  int64_t num_steps() const { return num_groups() * steps_of_group(); }
  int64_t group_bytes() const { return divide_up(group_size, INPUTS_OF_VECTOR) * VECTOR_BYTES; }  // of a tile of outputs
  int64_t tile_bytes() const { return num_groups() * group_bytes(); }
  int64_t num_panels() const { return divide_up(rows().num_rows, TILE_ROWS); }
  int64_t height() const { return std::min(rows().num_rows, TILE_ROWS); }  // rows per panel; the last panel is padded with zeros
  int64_t step_bytes() const { return height() * TILE_ROW_BYTES; }
  int64_t num_fills() const { return num_panels(); }
  int64_t panels_of_chunk() const { return ROW_TILES_OF_CHUNK; }
  int64_t tiles_of_chunk() const { return TILES_OF_CHUNK; }
  int64_t scale_bytes() const { return divide_up(rows().num_rows * num_groups() * sizeof(float), ALIGNMENT) * ALIGNMENT; }
  int64_t panel_bytes() const { return num_panels() * num_steps() * step_bytes() + scale_bytes() + ALIGNMENT; }
  void assign_memory(char *memory) { scales = reinterpret_cast<float *>(aligned(memory)), panels = reinterpret_cast<char *>(scales) + scale_bytes(); }
  char *panel(int64_t number) const { return panels + number * num_steps() * step_bytes(); }
};

// One group of a job, in the form that tile_products.h multiplies.
struct Group {
  const Job &job;
  int64_t number;

  int64_t num_steps() const { return job.steps_of_group(); }
  int64_t step_bytes() const { return job.step_bytes(); }
  const char *panel(int64_t panel) const { return job.panel(panel) + number * num_steps() * step_bytes(); }
};

void fill_panel(const Job &job, int64_t panel) {
  const Rows &rows = job.rows();
  const int64_t size = job.group_size, step_bytes = job.step_bytes();
  thread_local std::vector<uint16_t> buffer;
  uint16_t *group = aligned_buffer(buffer, job.steps_of_group() * INPUTS_OF_STEP);
  std::fill_n(group, job.steps_of_group() * INPUTS_OF_STEP, 0);
  for (int64_t row = 0; row < job.height(); ++row) {
    const int64_t index = panel * TILE_ROWS + row;
    char *to = job.panel(panel) + row * TILE_ROW_BYTES;
    if (index >= rows.num_rows) std::fill_n(group, size, 0);
    for (int64_t g = 0; g < job.num_groups(); ++g) {
      const int64_t first = index * rows.num_inputs + g * size;
      if (index < rows.num_rows) {
        if (rows.scales)
          for (int64_t i = 0; i < size; ++i) group[i] = BFLOAT16_OF_FLOAT8[static_cast<const uint8_t *>(rows.x)[first + i]];
        else
          std::copy_n(static_cast<const uint16_t *>(rows.x) + first, size, group);
        job.scales[index * job.num_groups() + g] = rows.scales ? rows.scales[index * rows.scale_stride + (rows.scale_stride > 1 ? g : 0)] : 1.0f;
      }
      for (int64_t step = 0; step < job.steps_of_group(); ++step, to += step_bytes)
        std::memcpy(to, group + step * INPUTS_OF_STEP, TILE_ROW_BYTES);
    }
  }
}

// Reads one group of one tile of outputs, block after block.
struct Reader {
  Float8Tables tables;
  const uint8_t *codes;
  Prefetcher prefetcher;
  int64_t num_vectors;

  // num_tiles: the tiles that are read alternately.
  void begin(const Job &job, const Weight &weight, int64_t tile, int64_t group, int64_t num_tiles) {
    codes = weight.memory + tile * job.tile_bytes() + group * job.group_bytes();
    num_vectors = job.group_bytes() / VECTOR_BYTES;
    prefetcher = {weight.memory + tile * job.tile_bytes(), job.tile_bytes(), num_tiles};
  }

  // Codes are never stored in the form that tile loads need.
  static bool is_loadable(int64_t, int64_t) { return false; }
  const uint8_t *at(int64_t) const { return codes; }

  // Reads four pairs, with zeros after the last input of the group.
  void read_pairs(int64_t quarter, Ints (&pairs)[PAIRS_OF_QUARTER]) const {
    UNROLL
    for (int64_t i = 0; i < VECTORS_OF_QUARTER; ++i) {
      const int64_t vector = quarter * VECTORS_OF_QUARTER + i;
      Ints steps[2] = {splat(0), splat(0)};
      if (vector < num_vectors) [[likely]] {
        prefetcher.fetch(codes + vector * VECTOR_BYTES);
        ::expand(tables, load(codes + vector * VECTOR_BYTES), steps);
      }
      pairs[2 * i] = steps[0], pairs[2 * i + 1] = steps[1];
    }
  }

  void expand(int64_t quarter, uint8_t *to) const {
    Ints pairs[PAIRS_OF_QUARTER];
    read_pairs(quarter, pairs);
    UNROLL
    for (int64_t pair = 0; pair < PAIRS_OF_QUARTER; ++pair) store(to + pair * PAIR_BYTES, pairs[pair]);
  }
};

// Computes sums [rows, tiles of the item, 16] of one group.
void multiply_group(const Job &job, int64_t group, const Weight &weight, const WorkItem &item, float *sums) {
  const int64_t num_tiles = item.last_tile - item.first_tile;
  const Group operand{job, group};
  Reader readers[TILES_OF_CHUNK];
  const auto multiply_few = [&]<int COLUMNS>(int64_t first) {
    for (int64_t t = 0; t < COLUMNS; ++t) readers[t].begin(job, weight, item.first_tile + first + t, group, COLUMNS);
    if (job.rows().num_rows > 1) return stream<Bfloat16Unit, COLUMNS>(operand, readers, sums + first * LANES);
    multiply_row<COLUMNS>(operand, divide_up(job.group_size, 2), sums + first * LANES,
                          [&](int64_t t, int64_t quarter, Ints (&pairs)[PAIRS_OF_QUARTER]) { readers[t].read_pairs(quarter, pairs); });
  };
  if (job.has_few_rows() && num_tiles == TILES_OF_CHUNK) return multiply_few.operator()<TILES_OF_CHUNK>(0);
  if (job.rows().num_rows == 1) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) multiply_few.operator()<1>(tile);
    return;
  }
  for (int64_t t = 0; t < num_tiles; ++t) readers[t].begin(job, weight, item.first_tile + t, group, num_tiles);
  multiply_many<Bfloat16Unit>(operand, readers, item, sums);
}

// Computes totals [rows, tiles of the item, 16]: the products of all groups.
void multiply_groups(const Job &job, const Weight &weight, int64_t all_tiles, const WorkItem &item, int64_t num_rows, float *totals) {
  thread_local std::vector<float> buffer;
  const int64_t num_tiles = item.last_tile - item.first_tile, width = num_tiles * LANES, num_groups = job.num_groups();
  const auto *scales = reinterpret_cast<const float *>(weight.memory + all_tiles * job.tile_bytes());
  float *sums = aligned_buffer(buffer, (item.last_panel - item.first_panel) * TILE_ROWS * width);
  std::fill_n(totals, num_rows * width, 0.0f);
  for (int64_t group = 0; group < num_groups; ++group) {
    multiply_group(job, group, weight, item, sums);
    for (int64_t t = 0; t < num_tiles; ++t) {
      const Floats scale = load(scales + ((item.first_tile + t) * num_groups + group) * LANES);
      for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t at = row * width + t * LANES;
        const Floats scale_product = multiply(scale, splat(job.scales[(item.first_panel * TILE_ROWS + row) * num_groups + group]));
        store(totals + at, multiply_add(load(sums + at), scale_product, load(totals + at)));
      }
    }
  }
}

void multiply_item(const Job &job, const WorkItem &item) {
  thread_local std::vector<float> buffer[2];
  const Output &out = *item.out;
  const Dtype dtype = job.rows().dtype;
  const int64_t first_row = item.first_panel * TILE_ROWS, num_rows = std::min(item.last_panel * TILE_ROWS, job.rows().num_rows) - first_row;
  const int64_t num_tiles = item.last_tile - item.first_tile, width = num_tiles * LANES;
  const int64_t count = std::min(width, out.num_outputs - item.first_tile * LANES);
  const auto compute = [&](const Weight &weight, std::vector<float> &memory) {
    float *result = aligned_buffer(memory, num_rows * width);
    multiply_groups(job, weight, out.num_tiles(), item, num_rows, result);
    if (weight.bias) {  // the product is rounded to the dtype first
      round_to(dtype, result, num_rows * width);
      add_bias(weight, dtype, num_rows, item.first_tile, num_tiles, count, result);
    }
    return result;
  };
  configure_tiles(shapes_of_product(job.height()));
  float *result = compute(out.weight, buffer[0]), *up = out.up.memory ? compute(out.up, buffer[1]) : nullptr;
  release_tiles();
  write_rows(out, dtype, first_row, num_rows, item.first_tile, count, width, result, up);
}

}  // namespace

void multiply_float8_weights_by_tiles(int64_t group_size, const std::vector<Product> &products) {
  thread_local std::vector<Job> jobs;
  jobs.clear();
  for (const Product &product : products) jobs.push_back({product, group_size});
  run(jobs, fill_panel, multiply_item);
}

#endif
