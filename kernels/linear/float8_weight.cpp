// Products with float8 weights: dot products of bfloat16 if the rows are bfloat16 or float8, else of float32.
//
// M rows, K inputs, N outputs, G groups of inputs. A tile is 16 outputs, one per lane; a vector of codes is two steps
// of two inputs. Every group is one sum in the order of inputs. Groups are scaled and added in float32 in order, with
// one rounding each. So the bits of a row depend neither on other rows nor on how threads share the work.
#include <vector>

#include "../tiles.h"
#include "expanded.h"
#include "float8.h"
#include "products.h"

namespace {

constexpr int64_t VECTOR_BYTES = 64;
constexpr int64_t INPUTS_OF_VECTOR = VECTOR_BYTES / LANES;
constexpr int64_t PANELS_PER_CHUNK = 8;
constexpr int64_t PREFETCH_BYTES = 8192;
constexpr int MAX_ROWS = ACCUMULATORS;

// Bytes per input of a row: bfloat16 in pairs, or float32.
template <bool IN_PAIRS> constexpr int64_t INPUT_BYTES = IN_PAIRS ? 2 : 4;

template <bool IN_PAIRS> struct Job {
  Product product;
  int64_t group_size;
  char *panels = nullptr;  // panels of up to MAX_ROWS rows: [vectors, 2, rows, 2 inputs] or [vectors, 4, rows], then scales [G, rows]

  const Rows &rows() const { return product.rows; }
  int64_t num_groups() const { return rows().num_inputs / group_size; }
  int64_t group_vectors() const { return divide_up(group_size, INPUTS_OF_VECTOR); }
  int64_t num_vectors() const { return num_groups() * group_vectors(); }
  int64_t tile_bytes() const { return num_vectors() * VECTOR_BYTES; }
  bool expands() const { return CAN_EXPAND && !IN_PAIRS && rows().num_rows >= ROWS_TO_EXPAND; }
  int64_t tiles_of_chunk() const { return expands() ? TILES_OF_EXPANSION : TILES_OF_CHUNK; }
  int64_t num_panels() const { return divide_up(rows().num_rows, MAX_ROWS); }
  int64_t num_fills() const { return num_panels(); }
  int64_t panels_of_chunk() const { return expands() ? panels_per_expansion(num_panels()) : PANELS_PER_CHUNK; }
  int64_t height() const { return divide_up(rows().num_rows, std::max<int64_t>(num_panels(), 1)); }
  int64_t height(int64_t panel) const { return std::min(height(), rows().num_rows - panel * height()); }
  int64_t inputs_bytes() const { return num_vectors() * INPUTS_OF_VECTOR * INPUT_BYTES<IN_PAIRS>; }  // of a row
  int64_t row_bytes() const { return inputs_bytes() + num_groups() * sizeof(float); }
  int64_t panel_bytes() const { return rows().num_rows * row_bytes(); }
  char *inputs(int64_t panel) const { return panels + panel * height() * row_bytes(); }
  float *scales(int64_t panel) const { return reinterpret_cast<float *>(inputs(panel) + height(panel) * inputs_bytes()); }
  void assign_memory(char *memory) { panels = memory; }
};

// Reads numbers `first` to `first` + count - 1 of all rows in the format of a panel.
template <bool IN_PAIRS> void read_inputs(const Rows &rows, int64_t first, int64_t count, void *to) {
  if (!IN_PAIRS && rows.scales) {
    for (int64_t i = 0; i < count; ++i)
      static_cast<float *>(to)[i] = from_bfloat16(BFLOAT16_OF_FLOAT8[static_cast<const uint8_t *>(rows.x)[first + i]]);
  } else if constexpr (!IN_PAIRS) {
    read_floats(rows.x, rows.dtype, first, count, static_cast<float *>(to));
  } else if (rows.scales) {
    for (int64_t i = 0; i < count; ++i) static_cast<uint16_t *>(to)[i] = BFLOAT16_OF_FLOAT8[static_cast<const uint8_t *>(rows.x)[first + i]];
  } else {
    std::copy_n(static_cast<const uint16_t *>(rows.x) + first, count, static_cast<uint16_t *>(to));
  }
}

template <bool IN_PAIRS> void fill_panel(const Job<IN_PAIRS> &job, int64_t panel) {
  using Number = std::conditional_t<IN_PAIRS, uint16_t, float>;
  constexpr int64_t PER_WORD = 4 / INPUT_BYTES<IN_PAIRS>;
  const Rows &rows = job.rows();
  const int64_t height = job.height(panel), words = job.group_vectors() * INPUTS_OF_VECTOR / PER_WORD;
  thread_local std::vector<Number> group;
  group.assign(words * PER_WORD, 0);
  for (int64_t row = 0; row < height; ++row)
    for (int64_t g = 0; g < job.num_groups(); ++g) {
      const int64_t index = panel * job.height() + row;
      read_inputs<IN_PAIRS>(rows, index * rows.num_inputs + g * job.group_size, job.group_size, group.data());
      auto *to = reinterpret_cast<int32_t *>(job.inputs(panel)) + g * words * height + row;
      for (int64_t word = 0; word < words; ++word) std::memcpy(to + word * height, group.data() + word * PER_WORD, sizeof(int32_t));
      job.scales(panel)[g * height + row] = rows.scales ? rows.scales[index * rows.scale_stride + (rows.scale_stride > 1 ? g : 0)] : 1.0f;
    }
}

// The addresses where a kernel starts to read.
struct Sources {
  const uint8_t *codes;  // codes, or expanded codes, of the first tile; tiles are tile_bytes apart
  int64_t tile_bytes;
  const float *scales;  // of the first tile and group; tiles are tile_scales apart, groups LANES
  int64_t tile_scales;
  const int32_t *x;
  const float *x_scales;
  int64_t num_groups, group_vectors;
};

// out [ROWS, TILES, 16] = the products of ROWS rows and TILES tiles. Never inlined: the sums fill the registers, and
// the totals of groups stay in the L1 cache.
template <bool IN_PAIRS, bool EXPANDED, int ROWS, int TILES> [[gnu::noinline]] void dot(Sources from, float *out) {
  constexpr int64_t BYTES = EXPANDED ? 2 * VECTOR_BYTES : VECTOR_BYTES;
  const Float8Tables tables;
  const Ints upper_half = splat(static_cast<int32_t>(0xffff0000));
  const uint8_t *near_end = from.codes + from.tile_bytes - PREFETCH_BYTES;  // from here on the prefetched tile is TILES tiles further
  std::fill(out, out + ROWS * TILES * LANES, 0.0f);
  for (int64_t group = 0; group < from.num_groups; ++group) {
    Floats sums[ROWS][TILES];
    UNROLL
    for (int row = 0; row < ROWS; ++row)
      UNROLL
      for (int t = 0; t < TILES; ++t) sums[row][t] = splat(0.0f);
    for (int64_t vector = 0; vector < from.group_vectors; ++vector, from.codes += BYTES) {
      const int64_t ahead = PREFETCH_BYTES + (from.codes < near_end ? 0 : (TILES - 1) * from.tile_bytes);
      Ints w[TILES][2];
      UNROLL
      for (int t = 0; t < TILES; ++t) {
        _mm_prefetch(reinterpret_cast<const char *>(from.codes + t * from.tile_bytes + ahead), _MM_HINT_T1);
        const uint8_t *at = from.codes + t * from.tile_bytes;
        if constexpr (EXPANDED)
          w[t][0] = load(at), w[t][1] = load(at + VECTOR_BYTES);
        else
          expand(tables, load(at), w[t]);
      }
      UNROLL
      for (int step = 0; step < 2; ++step) {
        if constexpr (IN_PAIRS) {
          UNROLL
          for (int row = 0; row < ROWS; ++row) {
            const Ints x = splat(from.x[row]);
            UNROLL
            for (int t = 0; t < TILES; ++t) sums[row][t] = dot_bfloat16(sums[row][t], w[t][step], x);
          }
          from.x += ROWS;
        } else {
          UNROLL
          for (int odd = 0; odd < 2; ++odd, from.x += ROWS) {
            Floats numbers[TILES];
            UNROLL
            for (int t = 0; t < TILES; ++t) numbers[t] = as_floats(odd ? bit_and(w[t][step], upper_half) : shift_left<16>(w[t][step]));
            UNROLL
            for (int row = 0; row < ROWS; ++row) {
              const Floats x = as_floats(splat(from.x[row]));
              UNROLL
              for (int t = 0; t < TILES; ++t) sums[row][t] = multiply_add(numbers[t], x, sums[row][t]);
            }
          }
        }
      }
    }
    UNROLL
    for (int row = 0; row < ROWS; ++row)
      UNROLL
      for (int t = 0; t < TILES; ++t) {
        float *total = out + (row * TILES + t) * LANES;
        const Floats scale = multiply(load(from.scales + t * from.tile_scales), splat(from.x_scales[row]));
        store(total, multiply_add(sums[row][t], scale, load(total)));
      }
    from.scales += LANES, from.x_scales += ROWS;
  }
}

// The codes of an output's weights, from tile number `first_tile` on.
struct OutputCodes {
  const Output &out;
  bool are_expanded;
  int64_t tile_bytes, first_tile;
  const uint8_t *memory[2];  // of the weight and of `up`

  const uint8_t *at(const Weight &weight, int64_t tile) const { return memory[&weight == &out.up] + (tile - first_tile) * tile_bytes; }
};

// Expands the codes of the item's tiles to bfloat16, in memory of this thread.
const uint8_t *expand_tiles(const Weight &weight, const WorkItem &item, int64_t tile_bytes, std::vector<uint8_t> &memory) {
  const Float8Tables tables;
  const int64_t num_bytes = (item.last_tile - item.first_tile) * tile_bytes;
  const uint8_t *from = weight.memory + item.first_tile * tile_bytes;
  uint8_t *const expanded = aligned_buffer(memory, 2 * num_bytes);
  for (int64_t byte = 0; byte < num_bytes; byte += VECTOR_BYTES) {
    Ints steps[2];
    expand(tables, load(from + byte), steps);
    store(expanded + 2 * byte, steps[0]), store(expanded + 2 * byte + VECTOR_BYTES, steps[1]);
  }
  return expanded;
}

// result [ROWS, tiles, 16] = the products with the tiles from `tile` on: `count` numbers per row. The products are rounded
// to the dtype before the bias is added.
template <bool IN_PAIRS, int ROWS, int TILES>
void multiply(const Job<IN_PAIRS> &job, const OutputCodes &codes, const Weight &weight, int64_t panel, int64_t tile, int64_t num_tiles, int64_t count,
              float *result) {
  const auto *scales = reinterpret_cast<const float *>(weight.memory + codes.out.num_tiles() * job.tile_bytes());
  const int64_t tile_scales = job.num_groups() * LANES;
  const auto plain = num_tiles == TILES ? dot<IN_PAIRS, false, ROWS, TILES> : dot<IN_PAIRS, false, ROWS, 1>;
  const auto expanded = num_tiles == TILES ? dot<IN_PAIRS, true, ROWS, TILES> : dot<IN_PAIRS, true, ROWS, 1>;
  const auto product = codes.are_expanded ? expanded : plain;
  product({codes.at(weight, tile), codes.tile_bytes, scales + tile * tile_scales, tile_scales,
           reinterpret_cast<const int32_t *>(job.inputs(panel)), job.scales(panel), job.num_groups(), job.group_vectors()},
          result);
  if (!weight.bias) return;
  round_to(job.rows().dtype, result, ROWS * num_tiles * LANES);
  add_bias(weight, job.rows().dtype, ROWS, tile, num_tiles, count, result);
}

// Multiplies a panel of at most ROWS rows by tiles first to last - 1.
template <bool IN_PAIRS, int ROWS> void multiply_panel(const Job<IN_PAIRS> &job, const OutputCodes &codes, int64_t panel, const WorkItem &item) {
  if constexpr (ROWS > 1)
    if (job.height(panel) < ROWS) return multiply_panel<IN_PAIRS, ROWS - 1>(job, codes, panel, item);
  constexpr int FIT = ACCUMULATORS / ROWS, TILES = FIT >= 4 ? 4 : 1;
  write_tiles<ROWS, TILES>(*item.out, job.rows().dtype, panel * job.height(), item.first_tile, item.last_tile,
                           [&](const Weight &weight, int64_t tile, int64_t num_tiles, int64_t count, float *result) {
                             multiply<IN_PAIRS, ROWS, TILES>(job, codes, weight, panel, tile, num_tiles, count, result);
                           });
}

// Expands vectors of codes to float32 [num_inputs, 16].
void expand_block(const uint8_t *codes, int64_t num_inputs, float *block) {
  const Float8Tables tables;
  for (int64_t input = 0; input < num_inputs; input += INPUTS_OF_VECTOR, codes += VECTOR_BYTES) {
    Ints steps[2];
    expand(tables, load(codes), steps);
    for (const Ints step : steps) {
      store(block, as_floats(shift_left<16>(step))), store(block + LANES, as_floats(bit_and(step, splat(-65536))));
      block += 2 * LANES;
    }
  }
}

// results [num_rows, 16] += the scaled sums of a group.
void scale_sums(const float *sums, int64_t num_rows, const float *scales, const float *x_scales, float *results) {
  const Floats scale = load(scales);
  for (int64_t row = 0; row < num_rows; ++row, sums += LANES, results += LANES)
    store(results, multiply_add(load(sums), ::multiply(scale, splat(x_scales[row])), load(results)));
}

// Multiplies the item's rows by its tiles of a weight: results [tiles, rows, 16]. The same bits as `dot`.
template <class Job> void multiply_expanded(const Job &job, const WorkItem &item, const Weight &weight, float *results) {
  thread_local std::vector<float> block_memory, sums_memory;
  const int64_t num_tiles = item.last_tile - item.first_tile, first_row = item.first_panel * job.height(), num_groups = job.num_groups();
  const int64_t num_rows = std::min(item.last_panel * job.height(), job.rows().num_rows) - first_row, size = num_tiles * num_rows * LANES;
  float *const block = aligned_buffer(block_memory, INPUTS_OF_BLOCK * LANES), *const sums = aligned_buffer(sums_memory, size);
  const auto *scales = reinterpret_cast<const float *>(weight.memory + item.out->num_tiles() * job.tile_bytes());
  const int64_t group_inputs = job.group_vectors() * INPUTS_OF_VECTOR;
  std::fill_n(results, size, 0.0f);
  for (int64_t group = 0; group < num_groups; ++group) {
    std::fill_n(sums, size, 0.0f);
    for (int64_t begin = 0; begin < group_inputs; begin += INPUTS_OF_BLOCK) {
      const int64_t first = group * group_inputs + begin, count = std::min(INPUTS_OF_BLOCK, group_inputs - begin);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t number = item.first_tile + tile;
        expand_block(weight.memory + number * job.tile_bytes() + first * VECTOR_BYTES / INPUTS_OF_VECTOR, count, block);
        for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel) {
          const int64_t height = job.height(panel), at = (tile * num_rows + panel * job.height() - first_row) * LANES;
          add_products(height, reinterpret_cast<const float *>(job.inputs(panel)) + first * height, block, count, sums + at);
          if (begin + count == group_inputs)
            scale_sums(sums + at, height, scales + (number * num_groups + group) * LANES, job.scales(panel) + group * height, results + at);
        }
      }
    }
  }
}

// Codes are expanded first if several panels read them.
template <bool IN_PAIRS> void multiply_item(const Job<IN_PAIRS> &job, const WorkItem &item) {
  thread_local std::vector<uint8_t> buffers[2];
  const Output &out = *item.out;
  if constexpr (CAN_EXPAND && !IN_PAIRS)
    if (job.expands()) {
      const int64_t first = item.first_panel * job.height(), count = std::min(item.last_panel * job.height(), job.rows().num_rows) - first;
      return write_expanded(job.rows(), out, item, first, count, true,
                            [&](const Weight &weight, float *results) { multiply_expanded(job, item, weight, results); });
    }
  OutputCodes codes{out, item.last_panel - item.first_panel > 1, job.tile_bytes(), 0, {out.weight.memory, out.up.memory}};
  if (codes.are_expanded) {
    codes.tile_bytes *= 2, codes.first_tile = item.first_tile;
    codes.memory[0] = expand_tiles(out.weight, item, job.tile_bytes(), buffers[0]);
    if (out.up.memory) codes.memory[1] = expand_tiles(out.up, item, job.tile_bytes(), buffers[1]);
  }
  for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel) multiply_panel<IN_PAIRS, MAX_ROWS>(job, codes, panel, item);
}

template <bool IN_PAIRS> void multiply_all(int64_t group_size, const std::vector<Product> &products) {
  thread_local std::vector<Job<IN_PAIRS>> jobs;
  jobs.clear();
  for (const Product &product : products) jobs.push_back({product, group_size});
  run(jobs, fill_panel<IN_PAIRS>, multiply_item<IN_PAIRS>);
}

#ifndef HAS_TILES
// Many rows are converted to float32 if weights are expanded to it.
void multiply_in_pairs(int64_t group_size, const std::vector<Product> &products) {
  thread_local std::vector<Product> few, many;
  few.clear(), many.clear();
  for (const Product &product : products) (CAN_EXPAND && product.rows.num_rows >= ROWS_TO_EXPAND ? many : few).push_back(product);
  if (!few.empty()) multiply_all<true>(group_size, few);
  if (!many.empty()) multiply_all<false>(group_size, many);
}
#endif

}  // namespace

void multiply_float8_weights(int64_t group_size, const std::vector<Product> &products) {
  if (products.empty()) return;
  const Rows &rows = products[0].rows;
  if (rows.scales || rows.dtype == Dtype::bfloat16)
#ifdef HAS_TILES
    multiply_float8_weights_by_tiles(group_size, products);
#else
    multiply_in_pairs(group_size, products);
#endif
  else
    multiply_all<false>(group_size, products);
}
