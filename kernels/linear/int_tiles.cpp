// Products with integer weights on the AMX unit: bit-identical to int_weight.cpp, and faster for many rows. Weights in
// ggml's blocks are first expanded to bytes, some tiles of outputs at a time: bit-identical to block_weight.cpp.
//
// A step is 64 inputs. The step of 16 outputs fills a tile, in the order of kernels/linear/int_weight.py, and so does
// the step of 16 rows. A segment of 32 inputs is half a step, a segment of 16 inputs a quarter.
#include "../tiles.h"

#ifdef HAS_TILES

#include <algorithm>
#include <vector>

#include "../aligned_buffer.h"
#include "activations.h"
#include "block_weight.h"
#include "tile_products.h"

namespace {

constexpr int64_t INPUTS_OF_STEP = 64, BYTES_OF_INPUT = 16;  // BYTES_OF_INPUT: of a tile of outputs
constexpr int64_t NUMBERS_OF_TILE = TILE_ROWS * LANES;
constexpr int64_t ROWS_OF_FILL = 2;    // rows that a thread prepares at a time
constexpr int64_t STEPS_OF_BLOCK = 4;  // steps of a weight per block, if segments are short

// What a group of asymmetric codes has in addition to its scale: an integer zero point, or a float minimum at the same
// address. The row's sum that a minimum is multiplied by is a float, too.
enum class Asymmetry { none, zero_points, minimums };

// Up to 16 rows: bytes [steps, LIMBS, 16 rows, 64 inputs]; scales and sums as in activations.h.
template <int LIMBS> struct RowTile {
  static constexpr int64_t num_rows = TILE_ROWS;
  uint8_t *bytes;
  float *scales;
  int32_t *sums;

  static constexpr int64_t STEP_BYTES = LIMBS * TILE_BYTES;

  void put(int64_t row, int limb, int64_t first, int64_t count, const int8_t *from) const {
    while (count > 0) {
      const int64_t begin = first % INPUTS_OF_STEP, length = std::min(count, INPUTS_OF_STEP - begin);
      std::memcpy(bytes + first / INPUTS_OF_STEP * STEP_BYTES + limb * TILE_BYTES + row * TILE_ROW_BYTES + begin, from, length);
      first += length, from += length, count -= length;
    }
  }
};

template <int LIMBS> struct Job {
  Product product;
  Layout layout;
  int64_t num_inputs, num_steps, segment, num_segments;  // steps of four inputs, as in activations.h
  int32_t offset;
  Asymmetry asymmetry;
  Codes blocks = Codes::none;  // ggml's blocks, which are expanded to the format of the layout
  char *memory = nullptr;

  Job(const Product &product, const Layout &layout)
      : product(product), layout(layout), num_inputs(layout.num_inputs), num_steps(layout.num_steps()), segment(segment_of(layout, LIMBS)),
        num_segments(divide_up(num_inputs, segment)), offset(layout.offset()),
        asymmetry(layout.has_zeros ? Asymmetry::zero_points : Asymmetry::none) {}
  template <class Kind>
  Job(const Product &product, Codes blocks, Kind) : Job(product, {{Kind::group, Codes::int8, false}, product.rows.num_inputs}) {
    offset = Kind::offset, asymmetry = Kind::has_minimums ? Asymmetry::minimums : Asymmetry::none, this->blocks = blocks;
  }

  const Rows &rows() const { return product.rows; }
  bool has_few_rows() const { return rows().num_rows <= TILE_ROWS; }
  int64_t num_tile_steps() const { return divide_up(num_steps * STEP, INPUTS_OF_STEP); }
  int64_t num_panels() const { return divide_up(rows().num_rows, TILE_ROWS); }
  int64_t num_fills() const { return divide_up(rows().num_rows, ROWS_OF_FILL); }
  int64_t panels_of_chunk() const { return ROW_TILES_OF_CHUNK; }
  int64_t tiles_of_chunk() const { return TILES_OF_CHUNK; }
  int64_t bytes_of_panel() const { return num_tile_steps() * LIMBS * TILE_BYTES + num_segments * TILE_ROWS * 8; }
  int64_t panel_bytes() const { return num_panels() * bytes_of_panel() + ALIGNMENT; }
  void assign_memory(char *at) { memory = aligned(at); }
  RowTile<LIMBS> panel(int64_t number) const {
    char *at = memory + number * bytes_of_panel();
    auto *scales = reinterpret_cast<float *>(at + num_tile_steps() * LIMBS * TILE_BYTES);
    return {reinterpret_cast<uint8_t *>(at), scales, reinterpret_cast<int32_t *>(scales + num_segments * TILE_ROWS)};
  }
};

template <int LIMBS> void fill_rows(const Job<LIMBS> &job, int64_t number) {
  for (int64_t index = number * ROWS_OF_FILL; index < std::min((number + 1) * ROWS_OF_FILL, job.rows().num_rows); ++index) {
    const RowTile<LIMBS> panel = job.panel(index / TILE_ROWS);
    const int64_t row = index % TILE_ROWS;
    for (int limb = 0; limb < LIMBS; ++limb)  // zeros after the last input
      std::memset(panel.bytes + (job.num_tile_steps() - 1) * panel.STEP_BYTES + limb * TILE_BYTES + row * TILE_ROW_BYTES, 0, TILE_ROW_BYTES);
    if (job.blocks == Codes::none)
      fill_row<LIMBS>(job, panel, row, job.rows(), index);
    else
      with_kind(job.blocks, [&](auto kind) { fill_row_of_kind<decltype(kind), LIMBS>(job, panel, row, job.rows(), index); });
  }
}

// Reads one tile of outputs, block after block.
struct Reader {
  const uint8_t *memory;  // of the tile
  Prefetcher prefetcher;
  int64_t num_bytes;  // after expansion to bytes
  bool are_bytes;

  // num_tiles: the tiles that are read alternately.
  void begin(const Layout &layout, const Weight &weight, int64_t tile, int64_t num_tiles) {
    memory = weight.memory + (tile - weight.first_tile) * layout.tile_bytes(), are_bytes = layout.bits() == 8;
    num_bytes = layout.num_steps() * STEP * BYTES_OF_INPUT;
    prefetcher = {memory, layout.tile_bytes(), num_tiles};
  }

  bool is_loadable(int64_t first, int64_t count) const { return are_bytes && (first + count) * TILE_BYTES <= num_bytes; }
  const uint8_t *at(int64_t step) const { return memory + step * TILE_BYTES; }

  // Writes 256 bytes, with zeros after the last input.
  void expand(int64_t quarter, uint8_t *to) const {
    const int64_t present = std::clamp<int64_t>(num_bytes - quarter * QUARTER, 0, QUARTER);
    const uint8_t *from = memory + (quarter * QUARTER >> (are_bytes ? 0 : 1));
    prefetcher.fetch<128>(from);
    if (are_bytes) {
      std::memcpy(to, from, present);
    } else {
      for (int64_t byte = 0; byte < present; byte += 128, from += 64) {
        const Ints codes = load(from), half = splat(0x0f0f0f0f);
        store(to + byte, bit_and(codes, half)), store(to + byte + 64, bit_and(shift_right<4>(codes), half));
      }
    }
    if (present < QUARTER) [[unlikely]] std::fill(to + present, to + QUARTER, 0);
  }
};

// The data of a weight for one segment, other than its codes.
struct Scales {
  const float *scales;  // of the segment's first tile; tiles are `stride` apart
  const int8_t *zeros;
  const float *minimums;
  int64_t stride;
};

// Adds the scaled sums of one segment [LIMBS, COLUMNS, 16 rows, 16] to totals [rows, COLUMNS, 16], in the order of
// int_weight.cpp. SCALES: whether segments of a row have scales.
template <int LIMBS, Asymmetry ASYMMETRY, bool SCALES, int COLUMNS>
void add_segment(const int32_t *sums, int64_t num_rows, const float *x_scales, const int32_t *x_sums, const Scales &from, float *totals,
                 int64_t stride) {
  UNROLL
  for (int t = 0; t < COLUMNS; ++t) {
    const Floats scale = load(from.scales + t * from.stride);
    const Ints zeros = ASYMMETRY == Asymmetry::zero_points ? load_bytes(from.zeros + t * from.stride) : splat(0);
    const Floats minimums = ASYMMETRY == Asymmetry::minimums ? load(from.minimums + t * from.stride) : splat(0.0f);
    for (int64_t row = 0; row < num_rows; ++row) {
      const auto limb = [&](int number) {
        return load(reinterpret_cast<const uint8_t *>(sums + (number * COLUMNS + t) * NUMBERS_OF_TILE + row * LANES));
      };
      const Ints begin = splat(x_sums[row]);
      Ints sum = limb(0);
      if constexpr (ASYMMETRY != Asymmetry::minimums) sum = add(ASYMMETRY == Asymmetry::zero_points ? multiply(zeros, begin) : begin, sum);
      if constexpr (LIMBS == 2) sum = add(sum, shift_left<8>(limb(1)));
      float *total = totals + row * stride + t * LANES;
      Floats result = multiply_add(to_floats(sum), SCALES ? multiply(scale, splat(x_scales[row])) : scale, load(total));
      if constexpr (ASYMMETRY == Asymmetry::minimums) result = multiply_add(as_floats(begin), minimums, result);
      store(total, result);
    }
  }
}

// AMX tiles 0 to 3 hold sums [LIMBS, COLUMNS]. One multiplication covers `depth` inputs: a step, or a segment if it is
// shorter.
template <int LIMBS, int COLUMNS>
void multiply_steps(const uint8_t *x, const uint8_t *const *weight, int64_t first_input, int64_t num_inputs, int64_t depth) {
  for (int64_t input = first_input; input < first_input + num_inputs; input += depth) {
    const uint8_t *rows = x + input / INPUTS_OF_STEP * LIMBS * TILE_BYTES + input % INPUTS_OF_STEP;
    const int64_t at = input * BYTES_OF_INPUT;
    load_tile<4>(rows, TILE_ROW_BYTES);
    load_tile<6>(weight[0] + at, TILE_ROW_BYTES);
    multiply_byte_tiles<0, 4, 6>();
    if constexpr (COLUMNS > 1) load_tile<7>(weight[1] + at, TILE_ROW_BYTES), multiply_byte_tiles<1, 4, 7>();
    if constexpr (LIMBS > 1) load_tile<5>(rows + TILE_BYTES, TILE_ROW_BYTES), multiply_byte_tiles<COLUMNS, 5, 6>();
    if constexpr (LIMBS > 1 && COLUMNS > 1) multiply_byte_tiles<3, 5, 7>();
  }
}

template <int LIMBS, int COLUMNS> void store_sums(int32_t *sums) {
  store_tile<0>(sums, TILE_ROW_BYTES);
  if constexpr (COLUMNS > 1) store_tile<1>(sums + NUMBERS_OF_TILE, TILE_ROW_BYTES);
  if constexpr (LIMBS > 1) store_tile<COLUMNS>(sums + COLUMNS * NUMBERS_OF_TILE, TILE_ROW_BYTES);
  if constexpr (LIMBS > 1 && COLUMNS > 1) store_tile<3>(sums + 3 * NUMBERS_OF_TILE, TILE_ROW_BYTES);
}

// The operands of a product: a tile of rows and a block of COLUMNS tiles of outputs.
template <int LIMBS> struct Operands {
  const Job<LIMBS> &job;
  RowTile<LIMBS> x;
  int64_t num_rows;
  const uint8_t *const *weight;
  int64_t first_input, num_inputs;  // of the block
  Scales scales;                    // of the first segment
  float *totals;
  int64_t stride;
};

// Multiplies segments of at most 128 inputs. While the AMX unit multiplies a segment, vector instructions scale the
// previous segment.
template <int LIMBS, Asymmetry ASYMMETRY, bool SCALES, int COLUMNS>
[[gnu::noinline]] void add_segments(const Operands<LIMBS> &operands, Block<Reader> &next_block) {
  constexpr int64_t BUFFER = 4 * NUMBERS_OF_TILE + 2 * LANES;  // padded, so that no load has the address, modulo 4096, of a recent store
  alignas(64) int32_t sums[2 * BUFFER];
  const int64_t segment = operands.job.segment, depth = std::min(segment, INPUTS_OF_STEP), num_groups = operands.job.layout.num_groups();
  const int64_t first = operands.first_input / segment, count = divide_up(operands.num_inputs, segment);
  const int64_t padded = divide_up(operands.num_inputs, depth) * depth;
  const auto add = [&](int64_t i) {
    const int64_t group = num_groups > 1 ? (first + i) * segment / operands.job.layout.group_size : 0, at = (first + i) * TILE_ROWS;
    const Scales &first_scales = operands.scales;
    const Scales scales{first_scales.scales + group * LANES, first_scales.zeros + group * LANES, first_scales.minimums + group * LANES,
                        first_scales.stride};
    add_segment<LIMBS, ASYMMETRY, SCALES, COLUMNS>(sums + i % 2 * BUFFER, operands.num_rows, operands.x.scales + at, operands.x.sums + at, scales,
                                           operands.totals, operands.stride);
  };
  const uint8_t *x = operands.x.bytes + operands.first_input / INPUTS_OF_STEP * operands.x.STEP_BYTES;
  for (int64_t i = 0; i < count; ++i) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    multiply_steps<LIMBS, COLUMNS>(x, operands.weight, i * segment, std::min(segment, padded - i * segment), depth);
    for (int64_t input = 0; input < segment; input += BYTES_OF_INPUT) next_block.read_quarter();
    if (i > 0) add(i - 1);
    store_sums<LIMBS, COLUMNS>(sums + i % 2 * BUFFER);
  }
  add(count - 1);
}

// Computes totals [rows of the item's panels, tiles of the item, 16].
template <int LIMBS, Asymmetry ASYMMETRY, bool SCALES = LIMBS == 2>
void multiply_in_segments(const Job<LIMBS> &job, const Weight &weight, int64_t all_tiles, const WorkItem &item, float *totals) {
  const int64_t num_tiles = item.last_tile - item.first_tile, width = num_tiles * LANES, groups = job.layout.num_groups() * LANES;
  Reader readers[TILES_OF_CHUNK];
  for (int64_t t = 0; t < num_tiles; ++t) readers[t].begin(job.layout, weight, item.first_tile + t, std::min<int64_t>(2, num_tiles));
  const int64_t first_row = item.first_panel * TILE_ROWS, num_rows = std::min(item.last_panel * TILE_ROWS, job.rows().num_rows) - first_row;
  std::fill_n(totals, num_rows * width, 0.0f);
  for_each_block(readers, num_tiles, job.num_tile_steps(), STEPS_OF_BLOCK,
                 [&](const Block<Reader> &block, int64_t tile, int64_t columns, int64_t step, int64_t count, Block<Reader> &next_block) {
    const int64_t first = step * INPUTS_OF_STEP, length = std::min(count * INPUTS_OF_STEP, job.num_steps * STEP - first);
    const int64_t at = (item.first_tile + tile - weight.first_tile) * groups;
    const int8_t *zeros = job.layout.zeros(weight, all_tiles);
    const Scales scales{job.layout.scales(weight, all_tiles) + at, zeros + at, reinterpret_cast<const float *>(zeros) + at, groups};
    for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel) {
      const int64_t row = panel * TILE_ROWS - first_row;
      const Operands<LIMBS> operands{job,   job.panel(panel), std::min(TILE_ROWS, num_rows - row),     block.tiles, first, length,
                                scales, totals + row * width + tile * LANES, width};
      (columns == 2 ? add_segments<LIMBS, ASYMMETRY, SCALES, 2> : add_segments<LIMBS, ASYMMETRY, SCALES, 1>)(operands, next_block);
    }
  });
  if constexpr (!SCALES)
    for (int64_t row = 0; row < num_rows; ++row) {
      const Floats scale = splat(job.panel(item.first_panel + row / TILE_ROWS).scales[row % TILE_ROWS]);
      for (int64_t i = 0; i < width; i += LANES) store(totals + row * width + i, multiply(load(totals + row * width + i), scale));
    }
}

// --- one segment for all inputs, for int8 rows ---

// A job in the form that tile_products.h multiplies.
struct OneSegment {
  const Job<1> &job;

  int64_t num_steps() const { return job.num_tile_steps(); }
  int64_t step_bytes() const { return TILE_BYTES; }
  const char *panel(int64_t number) const { return reinterpret_cast<const char *>(job.panel(number).bytes); }
};

struct Unit {
  template <int C, int A, int B> static void multiply() { multiply_byte_tiles<C, A, B>(); }
};

template <bool ZEROS> void multiply_one_segment(const Job<1> &job, const Weight &weight, int64_t all_tiles, const WorkItem &item, float *totals) {
  const int64_t num_tiles = item.last_tile - item.first_tile, width = num_tiles * LANES;
  const int64_t first_row = item.first_panel * TILE_ROWS, num_rows = std::min(item.last_panel * TILE_ROWS, job.rows().num_rows) - first_row;
  Reader readers[TILES_OF_CHUNK];
  for (int64_t t = 0; t < num_tiles; ++t) readers[t].begin(job.layout, weight, item.first_tile + t, num_tiles);
  auto *sums = reinterpret_cast<int32_t *>(totals);
  if (job.has_few_rows() && num_tiles == TILES_OF_CHUNK)
    stream<Unit, TILES_OF_CHUNK>(OneSegment{job}, readers, sums);
  else
    multiply_many<Unit>(OneSegment{job}, readers, item, sums);
  for (int64_t t = 0; t < num_tiles; ++t) {
    const Floats scale = load(job.layout.scales(weight, all_tiles) + (item.first_tile + t) * LANES);
    const Ints zeros = ZEROS ? load_bytes(job.layout.zeros(weight, all_tiles) + (item.first_tile + t) * LANES) : splat(0);
    for (int64_t row = 0; row < num_rows; ++row) {
      const RowTile<1> x = job.panel(item.first_panel + row / TILE_ROWS);
      const Ints begin = splat(x.sums[row % TILE_ROWS]);
      const int64_t at = row * width + t * LANES;
      const Ints sum = add(ZEROS ? multiply(zeros, begin) : begin, load(reinterpret_cast<const uint8_t *>(sums + at)));
      store(totals + at, multiply(multiply_add(to_floats(sum), scale, splat(0.0f)), splat(x.scales[row % TILE_ROWS])));
    }
  }
}

// Expands the item's tiles of a weight in ggml's blocks to bytes, in memory of this thread, and multiplies them.
template <int LIMBS>
void multiply_expanded(const Job<LIMBS> &job, const Weight &weight, const WorkItem &item, int64_t num_rows, float *totals) {
  thread_local std::vector<uint8_t> buffer;
  const int64_t num_tiles = item.last_tile - item.first_tile, num_floats = num_tiles * job.num_segments * LANES;
  uint8_t *bytes = aligned_buffer(buffer, num_tiles * job.layout.tile_bytes() + num_floats * 2 * int64_t{sizeof(float)});
  with_kind(job.blocks, [&](auto kind) {
    using Kind = decltype(kind);
    const int64_t tile_bytes = job.num_inputs / Kind::block * Kind::block_bytes;
    expand_tiles<Kind>(weight.memory + item.first_tile * tile_bytes, num_tiles, job.num_inputs, bytes);
  });
  const bool has_minimums = job.asymmetry == Asymmetry::minimums;
  const auto multiply = has_minimums ? multiply_in_segments<LIMBS, Asymmetry::minimums, true> : multiply_in_segments<LIMBS, Asymmetry::none, true>;
  multiply(job, {bytes, false, nullptr, item.first_tile}, num_tiles, item, totals);
  with_kind(job.blocks, [&](auto kind) {
    multiply_by_global_scale<decltype(kind)>(weight.memory, item.out->num_tiles(), job.num_inputs, num_rows * num_tiles * LANES, totals);
  });
}

template <int LIMBS> void multiply_item(const Job<LIMBS> &job, const WorkItem &item) {
  thread_local std::vector<float> buffer[2];
  const Output &out = *item.out;
  const Dtype dtype = job.rows().dtype;
  const int64_t num_panels = item.last_panel - item.first_panel, num_tiles = item.last_tile - item.first_tile, width = num_tiles * LANES;
  const int64_t first_row = item.first_panel * TILE_ROWS, num_rows = std::min(item.last_panel * TILE_ROWS, job.rows().num_rows) - first_row;
  const int64_t count = std::min(width, out.num_outputs - item.first_tile * LANES);
  const bool has_one_segment = LIMBS == 1 && job.num_segments == 1 && job.blocks == Codes::none;
  const auto compute = [&](const Weight &weight, std::vector<float> &memory) {
    float *result = aligned_buffer(memory, num_panels * TILE_ROWS * width);
    const auto in_segments = job.asymmetry == Asymmetry::zero_points ? multiply_in_segments<LIMBS, Asymmetry::zero_points>
                                                                     : multiply_in_segments<LIMBS, Asymmetry::none>;
    if (job.blocks != Codes::none) {
      multiply_expanded(job, weight, item, num_rows, result);
    } else if constexpr (LIMBS == 1) {
      const auto one_segment = job.layout.has_zeros ? multiply_one_segment<true> : multiply_one_segment<false>;
      (has_one_segment ? one_segment : in_segments)(job, weight, out.num_tiles(), item, result);
    } else {
      in_segments(job, weight, out.num_tiles(), item, result);
    }
    if (weight.bias) {  // the product is rounded to the dtype first
      round_to(dtype, result, num_rows * width);
      add_bias(weight, dtype, num_rows, item.first_tile, num_tiles, count, result);
    }
    return result;
  };
  configure_tiles(shapes_of_product(TILE_ROWS, has_one_segment ? INPUTS_OF_STEP : std::min(job.segment, INPUTS_OF_STEP)));
  float *result = compute(out.weight, buffer[0]), *up = out.up.memory ? compute(out.up, buffer[1]) : nullptr;
  release_tiles();
  write_rows(out, dtype, first_row, num_rows, item.first_tile, count, width, result, up);
}

template <int LIMBS> void multiply_all(const Format &format, const std::vector<Product> &products) {
  thread_local std::vector<Job<LIMBS>> jobs;
  jobs.clear();
  for (const Product &product : products) jobs.emplace_back(product, Layout{format, product.rows.num_inputs});
  run(jobs, fill_rows<LIMBS>, multiply_item<LIMBS>);
}

template <int LIMBS> void multiply_all_blocks(Codes codes, const std::vector<Product> &products) {
  thread_local std::vector<Job<LIMBS>> jobs;
  jobs.clear();
  with_kind(codes, [&](auto kind) {
    for (const Product &product : products) jobs.emplace_back(product, codes, kind);
  });
  run(jobs, fill_rows<LIMBS>, multiply_item<LIMBS>);
}

}  // namespace

void multiply_int_weights_by_tiles(const Format &format, const std::vector<Product> &products) {
  if (products[0].rows.scales)
    multiply_all<1>(format, products);
  else
    multiply_all<2>(format, products);
}

void multiply_block_weights_by_tiles(Codes codes, const std::vector<Product> &products) {
  if (products[0].rows.scales)
    multiply_all_blocks<1>(codes, products);
  else
    multiply_all_blocks<2>(codes, products);
}

#endif
