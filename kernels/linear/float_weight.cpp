// Products with floating-point weights: packed, compressed to 12 bits, or plain. Tiles of plain weights are packed when
// they are needed.
//
// M rows, K inputs, N outputs. A tile is 16 outputs, one per lane; a step is one input of float32 or float16, or two of
// bfloat16. float16 is converted to float32 before the product; rows are converted once for all outputs. Every output
// is one sum in the order of steps, kept in a register throughout, so the bits of a row depend neither on other rows
// nor on how threads share the work.
#include <algorithm>
#include <vector>

#include "../tiles.h"
#include "compressed.h"
#include "expanded.h"
#include "products.h"

namespace {

constexpr int64_t STEP_BYTES = 4;  // of a row
constexpr int64_t vector_bytes(Dtype dtype) { return LANES * (dtype == Dtype::float16 ? 2 : STEP_BYTES); }  // of a tile's step
constexpr int64_t ROWS_OF_CHUNK = 8 * ACCUMULATORS;
constexpr int64_t ROWS_PER_PACKING = 256;  // for a plain weight: packing a tile takes as long as multiplying ten rows by it
constexpr int64_t PREFETCH_BYTES = 8192;  // distance, into the L2 cache; 2048 bytes into the L1 cache are up to 1.15 times slower with 8 and 16 rows
// Up to FEW_ROWS rows of a 12-bit weight prefetch one of a group's three lines, because all three take 1.17 of one core's
// time. The processor fetches the other two itself, but not across the end of a page or a tile.
constexpr int FEW_ROWS = 2;
constexpr int64_t NEAR_BYTES = 2048, FIRST_BYTES = 1024;  // distance in a tile; the begin of the next tiles
// Rows per panel. Up to MAX_ROWS rows are one panel, which reads the weight once. More rows are split into panels that
// are multiplied by two tiles at once. These panels need fewer loads per product: a core that starts two products per
// cycle can do at most two loads for them. AVX2 has registers for one tile only, and multiplies
// ROWS_TO_EXPAND rows and more in blocks of inputs (expanded.h).
constexpr int MAX_ROWS = ACCUMULATORS, TILES_OF_MANY = ACCUMULATORS < 16 ? 1 : 2, MAX_ROWS_OF_MANY = ACCUMULATORS / TILES_OF_MANY;

struct Job {
  Product product;
  char *panels = nullptr;  // the rows in panels: [steps, rows, 4 bytes] each

  const Rows &rows() const { return product.rows; }
  bool is_compressed() const {
    return std::any_of(product.outputs, product.outputs + 3, [](const Output &out) { return out.weight.is_compressed || out.up.is_compressed; });
  }
  bool expands() const { return CAN_EXPAND && rows().num_rows >= ROWS_TO_EXPAND && !is_compressed(); }
  int64_t inputs_of_step() const { return rows().dtype == Dtype::bfloat16 ? 2 : 1; }
  int64_t num_weight_steps() const { return divide_up(rows().num_inputs, inputs_of_step()); }
  int64_t num_steps() const { return num_weight_steps() * (expands() ? inputs_of_step() : 1); }  // of a row
  int64_t tile_bytes() const { return num_weight_steps() * vector_bytes(rows().dtype); }
  bool has_many_rows() const { return rows().num_rows > MAX_ROWS; }
  int64_t tiles_of_chunk() const {
    if (expands()) return TILES_OF_EXPANSION;
    return has_many_rows() && !product.plain.numbers ? TILES_OF_MANY : TILES_OF_CHUNK;
  }
  int64_t max_height() const { return has_many_rows() ? MAX_ROWS_OF_MANY : MAX_ROWS; }
  int64_t num_panels() const { return divide_up(rows().num_rows, max_height()); }
  int64_t num_fills() const { return num_panels(); }
  int64_t panels_of_chunk() const {
    if (expands()) return panels_per_expansion(num_panels());
    return (product.plain.numbers ? ROWS_PER_PACKING : ROWS_OF_CHUNK) / max_height();
  }
  int64_t first_row(int64_t panel) const { return rows().num_rows * panel / num_panels(); }  // heights differ by at most one
  int64_t panel_bytes() const { return rows().num_rows * num_steps() * STEP_BYTES; }
  void assign_memory(char *memory) { panels = memory; }
};

void fill_panel(const Job &job, int64_t panel) {
  const Rows &rows = job.rows();
  const int64_t first = job.first_row(panel), height = job.first_row(panel + 1) - first;
  const int64_t row_bytes = rows.num_inputs * rows.out_bytes(), num_steps = job.num_steps();
  const bool in_pairs = rows.dtype == Dtype::bfloat16 && !job.expands();
  const int64_t num_bytes = in_pairs ? 2 : 4;  // of a number in the product
  thread_local std::vector<float> floats;
  auto *to = reinterpret_cast<int32_t *>(job.panels) + first * num_steps;
  for (int64_t row = 0; row < height; ++row) {
    const char *from = static_cast<const char *>(rows.x) + (first + row) * row_bytes;
    if (rows.dtype != Dtype::float32 && !in_pairs) {
      float *x = aligned_buffer(floats, rows.num_inputs);
      read_floats(from, rows.dtype, 0, rows.num_inputs, x);
      from = reinterpret_cast<const char *>(x);
    }
    for (int64_t step = 0; step < rows.num_inputs * num_bytes / STEP_BYTES; ++step)
      std::memcpy(to + step * height + row, from + step * STEP_BYTES, STEP_BYTES);
    if (const int64_t rest = rows.num_inputs * num_bytes % STEP_BYTES) {  // an odd number of bfloat16
      int32_t last = 0;
      std::memcpy(&last, from + row_bytes - rest, rest);
      to[(num_steps - 1) * height + row] = last;
    } else if (rows.num_inputs * num_bytes < num_steps * STEP_BYTES) {  // an expanded weight has a zero there
      to[(num_steps - 1) * height + row] = 0;
    }
  }
}

// Loads a step of a tile; float16 is converted to float32.
template <Dtype DTYPE> Ints load_step(const uint8_t *weight) {
  if constexpr (DTYPE == Dtype::float16) return as_ints(load_float16(reinterpret_cast<const uint16_t *>(weight)));
  return load(weight);
}

// The addresses that a kernel prefetches into the L2 cache while it multiplies TILES tiles.
struct PrefetchPlan {
  int64_t distance, advance;  // bytes ahead in each tile; bytes per step (per group of a compressed weight)
  int64_t jump_at, jump;      // from this step or group on, this many more bytes ahead
};

// A single panel prefetches the tiles that it multiplies, and near their end the tiles of the next call. Several panels
// share the prefetches of the next call's tiles. Otherwise the first panel would wait for memory, and memory would be
// idle during the remaining panels.
template <int TILES> PrefetchPlan prefetch_plan(int64_t tile_bytes, int64_t step_bytes, int64_t panel, int64_t num_panels) {
  if (num_panels == 1) return {PREFETCH_BYTES, step_bytes, (tile_bytes - PREFETCH_BYTES) / step_bytes, (TILES - 1) * tile_bytes};
  return {TILES * tile_bytes + tile_bytes * panel / num_panels, step_bytes / num_panels, -1, 0};
}

// result [ROWS, TILES, 16] = the products of ROWS rows and TILES tiles. Never inlined: inside other code the compiler
// keeps half of the sums in memory (2.2 times slower).
template <Dtype DTYPE, int ROWS, int TILES>
[[gnu::noinline]] void dot(const uint8_t *weight, int64_t tile_bytes, const PrefetchPlan &ahead, const int32_t *x, int64_t num_steps, float *result) {
  constexpr int64_t VECTOR_BYTES = vector_bytes(DTYPE);
  Floats sums[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) sums[row][t] = splat(0.0f);
  const char *fetched = reinterpret_cast<const char *>(weight) + ahead.distance;
  for (int64_t step = 0; step < num_steps; ++step, weight += VECTOR_BYTES, fetched += ahead.advance, x += ROWS) {
    if (step == ahead.jump_at) fetched += ahead.jump;
    Ints w[TILES];
    UNROLL
    for (int t = 0; t < TILES; ++t) {
      _mm_prefetch(fetched + t * tile_bytes, _MM_HINT_T1);
      w[t] = load_step<DTYPE>(weight + t * tile_bytes);
    }
    UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const Ints x_step = splat(x[row]);
      UNROLL
      for (int t = 0; t < TILES; ++t)
        sums[row][t] = DTYPE == Dtype::bfloat16 ? dot_bfloat16(sums[row][t], w[t], x_step)
                                                : multiply_add(as_floats(w[t]), as_floats(x_step), sums[row][t]);
    }
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) store(result + (row * TILES + t) * LANES, sums[row][t]);
}

// Prefetches the next exceptions and the begin of the next TILES tiles. Decode of 135 M parameters takes 0.97 of the time.
template <int TILES> void prefetch_next(const uint8_t *tiles, int64_t tile_bytes, const Exception *last_exceptions) {
  _mm_prefetch(reinterpret_cast<const char *>(last_exceptions) + 64, _MM_HINT_T0);
  for (int t = 0; t < TILES; ++t)
    for (int64_t byte = 0; byte < FIRST_BYTES; byte += 64)
      _mm_prefetch(reinterpret_cast<const char *>(tiles) + (TILES + t) * tile_bytes + byte, _MM_HINT_T1);
}

// Computes the same as `dot`, in the same order, for compressed tiles from number `tile` on.
template <int ROWS, int TILES>
[[gnu::noinline]] void dot_compressed(const uint8_t *weight, const Compressed &layout, int64_t tile, const PrefetchPlan &ahead, const int32_t *x,
                                      float *result) {
  Floats sums[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) sums[row][t] = splat(0.0f);
  const Ints upper = upper_bytes(weight);
  const Exception *next[TILES];
  for (int t = 0; t < TILES; ++t) next[t] = first_exception(weight, layout, tile + t);
  const int64_t tile_bytes = layout.tile_bytes();
  const uint8_t *bytes = weight + layout.groups(tile);
  constexpr bool HAS_FEW_ROWS = ROWS <= FEW_ROWS;
  if (HAS_FEW_ROWS) prefetch_next<TILES>(bytes, tile_bytes, next[TILES - 1]);
  const char *fetched = reinterpret_cast<const char *>(bytes) + (HAS_FEW_ROWS ? NEAR_BYTES : ahead.distance);
  const int64_t advance = HAS_FEW_ROWS ? GROUP_BYTES : ahead.advance;
  for (int64_t group = 0; group < layout.num_groups; ++group, bytes += GROUP_BYTES, fetched += advance) {
    if (!HAS_FEW_ROWS && group == ahead.jump_at) fetched += ahead.jump;
    UNROLL
    for (int t = 0; t < TILES; ++t)
      for (int64_t line = 0; line < (HAS_FEW_ROWS ? 64 : GROUP_BYTES); line += 64)
        _mm_prefetch(fetched + t * tile_bytes + line, _MM_HINT_T1);
    UNROLL
    for (int64_t half = 0; half < 2; ++half) {  // both steps of all tiles together, so that they share the loaded rows
      Ints steps[TILES][STEPS_OF_PAIR];
      UNROLL
      for (int t = 0; t < TILES; ++t) read_pair(bytes + t * tile_bytes, upper, next[t], group, half, steps[t]);
      const int64_t count = layout.num_steps - group * STEPS_OF_GROUP - half * STEPS_OF_PAIR;
      UNROLL
      for (int64_t step = 0; step < STEPS_OF_PAIR; ++step, x += ROWS) {
        if (step >= count) break;
        UNROLL
        for (int row = 0; row < ROWS; ++row) {
          const Ints x_step = splat(x[row]);
          UNROLL
          for (int t = 0; t < TILES; ++t) sums[row][t] = dot_bfloat16(sums[row][t], steps[t][step], x_step);
        }
      }
    }
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) store(result + (row * TILES + t) * LANES, sums[row][t]);
}

// result [ROWS, tiles, 16] = the products with the tiles from `tile` on, plus the bias: `count` numbers per row, then
// zeros.
template <Dtype DTYPE, int ROWS, int TILES>
void multiply(const Job &job, const Weight &weight, int64_t all_tiles, int64_t panel, int64_t tile, int64_t num_tiles, int64_t count, float *result) {
  const auto *x = reinterpret_cast<const int32_t *>(job.panels) + job.first_row(panel) * job.num_steps();
  const int64_t num_panels = std::min(job.num_panels(), job.panels_of_chunk()), number = panel % job.panels_of_chunk();
  if (weight.is_compressed) {
    const Compressed layout{all_tiles, job.num_steps()};
    const auto product = num_tiles == TILES ? dot_compressed<ROWS, TILES> : dot_compressed<ROWS, 1>;
    product(weight.memory, layout, tile, prefetch_plan<TILES>(layout.tile_bytes(), GROUP_BYTES, number, num_panels), x, result);
  } else {
    const int64_t bytes = job.tile_bytes();
    const auto product = num_tiles == TILES ? dot<DTYPE, ROWS, TILES> : dot<DTYPE, ROWS, 1>;
    product(weight.memory + (tile - weight.first_tile) * bytes, bytes, prefetch_plan<TILES>(bytes, vector_bytes(DTYPE), number, num_panels), x,
            job.num_steps(), result);
  }
  if (weight.bias) add_bias(weight, DTYPE, ROWS, tile, num_tiles, count, result);
}

// Multiplies panel number `panel`, of at most ROWS rows, by tiles first to last - 1.
template <Dtype DTYPE, int ROWS> void multiply_panel(const Job &job, const Output &out, int64_t panel, int64_t first, int64_t last) {
  const int64_t first_row = job.first_row(panel);
  if constexpr (ROWS > 1)
    if (job.first_row(panel + 1) - first_row < ROWS) return multiply_panel<DTYPE, ROWS - 1>(job, out, panel, first, last);
  constexpr int FIT = ACCUMULATORS / ROWS, TILES = FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  write_tiles<ROWS, TILES>(out, DTYPE, first_row, first, last,
                           [&](const Weight &weight, int64_t tile, int64_t num_tiles, int64_t count, float *result) {
                             multiply<DTYPE, ROWS, TILES>(job, weight, out.num_tiles(), panel, tile, num_tiles, count, result);
                           });
}

// Returns a block of a tile as float32 [num_inputs, 16], in `block` if it is not in the weight.
template <Dtype DTYPE> const float *expand(const uint8_t *tile, int64_t first, int64_t num_inputs, float *block) {
  if constexpr (DTYPE == Dtype::float32) return reinterpret_cast<const float *>(tile) + first * LANES;
  constexpr int64_t INPUTS_OF_STEP = DTYPE == Dtype::bfloat16 ? 2 : 1;
  tile += first / INPUTS_OF_STEP * vector_bytes(DTYPE);
  for (int64_t input = 0; input < num_inputs; input += INPUTS_OF_STEP, tile += vector_bytes(DTYPE)) {
    const Ints step = load_step<DTYPE>(tile);
    float *to = block + input * LANES;
    if constexpr (DTYPE == Dtype::bfloat16)
      store(to, as_floats(shift_left<16>(step))), store(to + LANES, as_floats(bit_and(step, splat(-65536))));
    else
      store(to, as_floats(step));
  }
  return block;
}

// Multiplies the item's rows by its tiles of a weight: results [tiles, rows, 16].
template <Dtype DTYPE> void multiply_expanded(const Job &job, const WorkItem &item, const Weight &weight, float *results) {
  thread_local std::vector<float> memory;
  float *const block = aligned_buffer(memory, INPUTS_OF_BLOCK * LANES);
  const int64_t first_row = job.first_row(item.first_panel), num_rows = job.first_row(item.last_panel) - first_row, num_inputs = job.num_steps();
  std::fill_n(results, (item.last_tile - item.first_tile) * num_rows * LANES, 0.0f);
  for (int64_t first = 0; first < num_inputs; first += INPUTS_OF_BLOCK) {
    const int64_t count = std::min(INPUTS_OF_BLOCK, num_inputs - first);
    for (int64_t tile = item.first_tile; tile < item.last_tile; ++tile) {
      const float *numbers = expand<DTYPE>(weight.memory + (tile - weight.first_tile) * job.tile_bytes(), first, count, block);
      float *of_tile = results + (tile - item.first_tile) * num_rows * LANES;
      for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel) {
        const int64_t row = job.first_row(panel), height = job.first_row(panel + 1) - row;
        const auto *x = reinterpret_cast<const float *>(job.panels) + row * num_inputs + first * height;
        add_products(height, x, numbers, count, of_tile + (row - first_row) * LANES);
      }
    }
  }
}

// Plain weights are packed first.
template <Dtype DTYPE> void multiply_item(const Job &job, const WorkItem &item) {
  Output out = *item.out;
  if (job.product.plain.numbers) {
    thread_local std::vector<uint8_t> packed;
    const int64_t tile_bytes = job.tile_bytes(), bytes = (item.last_tile - item.first_tile) * tile_bytes;
    if (packed.size() < static_cast<size_t>(bytes)) packed.resize(bytes);
    for (int64_t tile = item.first_tile; tile < item.last_tile; ++tile)
      pack_tile<DTYPE>(job.product.plain, out.num_outputs, job.rows().num_inputs, tile, packed.data() + (tile - item.first_tile) * tile_bytes);
    out.weight.memory = packed.data(), out.weight.first_tile = item.first_tile;
  }
  if constexpr (CAN_EXPAND)
    if (job.expands()) {
      const int64_t first = job.first_row(item.first_panel), count = job.first_row(item.last_panel) - first;
      return write_expanded(job.rows(), out, item, first, count, false,
                            [&](const Weight &weight, float *results) { multiply_expanded<DTYPE>(job, item, weight, results); });
    }
  for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel)
    multiply_panel<DTYPE, MAX_ROWS>(job, out, panel, item.first_tile, item.last_tile);
}

}  // namespace

void multiply_float_weights(const std::vector<Product> &products) {
#ifdef HAS_TILES
  if (!products.empty() && products[0].rows.dtype == Dtype::bfloat16) return multiply_bfloat16_weights_by_tiles(products);
#endif
  thread_local std::vector<Job> jobs;
  jobs.clear();
  for (const Product &product : products) jobs.push_back({product});
  run(jobs, fill_panel, [](const Job &job, const WorkItem &item) {
    const Dtype dtype = job.rows().dtype;
    const auto multiply = dtype == Dtype::float32    ? multiply_item<Dtype::float32>
                          : dtype == Dtype::bfloat16 ? multiply_item<Dtype::bfloat16>
                                                     : multiply_item<Dtype::float16>;
    multiply(job, item);
  });
}
