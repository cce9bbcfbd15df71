// x [M, K] times W [N, K] transposed, plus bias [N]; kernels/matmul/reference.py is the specification.
// Up to three weights in one call, each with its own result: rows are prepared once, and threads meet once. Or two of them, gate and up, with
// one result, silu(gate) * up. Or a weight that is not packed: its tiles are packed when their turn comes.
//
// M rows, K inputs, N outputs. A tile is 16 outputs, one for each lane; a step is one input of float32 or float16, or two of bfloat16. Numbers
// of float16 become float32 before they are multiplied, those of rows once for all outputs. Every output is one sum over the steps in their
// order, kept in a register from the first to the last, so a row's bits depend neither on the other rows nor on how the work was shared.
#include <algorithm>
#include <vector>

#include "../recording.h"
#include "../rows.h"
#include "../simd.h"
#include "../swiglu.h"
#include "../threads.h"
#include "compressed.h"
#include "plain.h"

namespace {

constexpr int64_t STEP_BYTES = 4;  // of a row
constexpr int64_t vector_bytes(Dtype dtype) { return LANES * (dtype == Dtype::float16 ? 2 : STEP_BYTES); }  // of a tile's step
constexpr int64_t TILES_PER_CHUNK = 4;
constexpr int64_t PANELS_PER_CHUNK = 8;
constexpr int64_t ROWS_PER_PACKING = 256;  // of a weight that is not packed: to pack a tile takes as long as to multiply some ten rows by it
constexpr int64_t PREFETCH_BYTES = 8192;  // ahead, into the second level; 2048 into the first are up to 1.15 times slower at 8 and 16 rows
constexpr int MAX_ROWS = ACCUMULATORS;     // of a panel: then one tile fills the registers, and 16 rows read the weight once

struct Rows {
  Dtype dtype;
  const char *x;
  int64_t num_rows, num_inputs;
  char *panels = nullptr;  // x, up to MAX_ROWS rows together: [steps, rows, 4 bytes] each

  int64_t element_bytes() const { return dtype == Dtype::float32 ? 4 : 2; }
  int64_t num_steps() const { return dtype == Dtype::bfloat16 ? divide_up(num_inputs, 2) : num_inputs; }
  int64_t tile_bytes() const { return num_steps() * vector_bytes(dtype); }
  int64_t num_panels() const { return divide_up(num_rows, MAX_ROWS); }
  int64_t height() const { return divide_up(num_rows, std::max<int64_t>(num_panels(), 1)); }
  int64_t panel_bytes() const { return num_rows * num_steps() * STEP_BYTES; }
};

struct Weight {
  const uint8_t *tiles;   // packed: [tiles, steps, 16, 4 bytes], of float16 2 bytes; or compressed, of bfloat16
  int32_t is_compressed;
  const void *bias;       // null if there is none
  int64_t first_tile = 0;  // the number of the one that `tiles` begins with, unless it is compressed
};

struct Output {
  Weight weight, up;  // if up has tiles, weight is the gate
  void *memory;
  int64_t num_outputs;

  int64_t num_tiles() const { return divide_up(num_outputs, LANES); }
  int64_t num_chunks() const { return divide_up(num_tiles(), TILES_PER_CHUNK); }
};

void fill_panel(const Rows &rows, int64_t panel) {
  const int64_t first = panel * rows.height(), height = std::min(rows.height(), rows.num_rows - first);
  const int64_t row_bytes = rows.num_inputs * rows.element_bytes(), num_steps = rows.num_steps();
  auto *to = reinterpret_cast<int32_t *>(rows.panels) + first * num_steps;
  for (int64_t row = 0; row < height; ++row) {
    const char *from = rows.x + (first + row) * row_bytes;
    if (rows.dtype == Dtype::float16) {
      for (int64_t step = 0; step < num_steps; ++step) {
        float x;
        read_floats(from, rows.dtype, step, 1, &x);
        std::memcpy(to + step * height + row, &x, STEP_BYTES);
      }
      continue;
    }
    for (int64_t step = 0; step < row_bytes / STEP_BYTES; ++step)
      std::memcpy(to + step * height + row, from + step * STEP_BYTES, STEP_BYTES);
    if (const int64_t rest = row_bytes % STEP_BYTES) {  // an odd number of bfloat16
      int32_t last = 0;
      std::memcpy(&last, from + row_bytes - rest, rest);
      to[(num_steps - 1) * height + row] = last;
    }
  }
}

// A step of a tile, of float16 as float32.
template <Dtype DTYPE> Ints load_step(const uint8_t *weight) {
  if constexpr (DTYPE == Dtype::float16) return as_ints(load_float16(reinterpret_cast<const uint16_t *>(weight)));
  return load(weight);
}

// result [ROWS, TILES, 16] = the products of ROWS rows and TILES tiles. Never inlined: among other code the compiler keeps half of the sums
// in memory (2.2 times slower).
template <Dtype DTYPE, int ROWS, int TILES>
[[gnu::noinline]] void dot(const uint8_t *weight, int64_t tile_bytes, const int32_t *x, int64_t num_steps, float *result) {
  constexpr int64_t VECTOR_BYTES = vector_bytes(DTYPE);
  Floats sums[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) sums[row][t] = splat(0.0f);
  const int64_t near_end = num_steps - PREFETCH_BYTES / VECTOR_BYTES;  // from here on the next tiles are fetched, TILES further on
  for (int64_t step = 0; step < num_steps; ++step, weight += VECTOR_BYTES, x += ROWS) {
    const int64_t ahead = PREFETCH_BYTES + (step < near_end ? 0 : (TILES - 1) * tile_bytes);
    Ints w[TILES];
    UNROLL
    for (int t = 0; t < TILES; ++t) {
      _mm_prefetch(reinterpret_cast<const char *>(weight + t * tile_bytes + ahead), _MM_HINT_T1);
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

// The same with compressed tiles from number `tile` on, in the same order.
template <int ROWS, int TILES>
[[gnu::noinline]] void dot_compressed(const uint8_t *weight, const Compressed &layout, int64_t tile, const int32_t *x, float *result) {
  Floats sums[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) sums[row][t] = splat(0.0f);
  const Ints upper = upper_bytes(weight);
  const Exception *next[TILES];
  for (int t = 0; t < TILES; ++t) next[t] = first_exception(weight, layout, tile + t);
  const int64_t tile_bytes = layout.tile_bytes(), near_end = layout.num_groups - PREFETCH_BYTES / GROUP_BYTES;
  const int64_t whole = layout.num_steps / STEPS_OF_GROUP;
  const uint8_t *bytes = weight + layout.groups(tile);
  for (int64_t group = 0; group < layout.num_groups; ++group, bytes += GROUP_BYTES) {
    const int64_t ahead = PREFETCH_BYTES + (group < near_end ? 0 : (TILES - 1) * tile_bytes);
    const int64_t count = group < whole ? STEPS_OF_GROUP : layout.num_steps % STEPS_OF_GROUP;
    UNROLL
    for (int t = 0; t < TILES; ++t) {
      for (int64_t line = 0; line < GROUP_BYTES; line += 64)
        _mm_prefetch(reinterpret_cast<const char *>(bytes + t * tile_bytes + ahead + line), _MM_HINT_T1);
      Ints steps[STEPS_OF_GROUP];
      read_group(bytes + t * tile_bytes, upper, next[t], group, steps);
      UNROLL
      for (int64_t step = 0; step < STEPS_OF_GROUP; ++step)
        if (step < count)
          UNROLL
          for (int row = 0; row < ROWS; ++row) sums[row][t] = dot_bfloat16(sums[row][t], steps[step], splat(x[step * ROWS + row]));
    }
    x += STEPS_OF_GROUP * ROWS;
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) store(result + (row * TILES + t) * LANES, sums[row][t]);
}

// result [ROWS, tiles, 16] = what the tiles from `tile` on give, with the bias: `count` numbers of each row, and zeros behind them.
template <Dtype DTYPE, int ROWS, int TILES>
void multiply(const Rows &rows, const Weight &weight, int64_t all_tiles, const int32_t *x, int64_t tile, int64_t num_tiles, int64_t count, float *result) {
  if (weight.is_compressed) {
    const auto product = num_tiles == TILES ? dot_compressed<ROWS, TILES> : dot_compressed<ROWS, 1>;
    product(weight.tiles, {all_tiles, rows.num_steps()}, tile, x, result);
  } else {
    const auto product = num_tiles == TILES ? dot<DTYPE, ROWS, TILES> : dot<DTYPE, ROWS, 1>;
    product(weight.tiles + (tile - weight.first_tile) * rows.tile_bytes(), rows.tile_bytes(), x, rows.num_steps(), result);
  }
  if (!weight.bias) return;
  float bias[TILES * LANES];
  read_floats(weight.bias, DTYPE, tile * LANES, count, bias);
  for (int64_t row = 0; row < ROWS; ++row)
    for (int64_t i = 0; i < count; ++i) result[row * num_tiles * LANES + i] += bias[i];
}

// Panel number `panel`, ROWS high or less, times the tiles first .. last - 1.
template <Dtype DTYPE, int ROWS> void multiply_panel(const Rows &rows, const Output &out, int64_t panel, int64_t first, int64_t last) {
  const int64_t first_row = panel * rows.height();
  if constexpr (ROWS > 1)
    if (std::min(rows.height(), rows.num_rows - first_row) < ROWS) return multiply_panel<DTYPE, ROWS - 1>(rows, out, panel, first, last);
  constexpr int FIT = ACCUMULATORS / ROWS, TILES = FIT >= 4 ? 4 : 1;
  alignas(64) float result[ROWS * TILES * LANES], up[ROWS * TILES * LANES];
  const auto *x = reinterpret_cast<const int32_t *>(rows.panels) + first_row * rows.num_steps();
  for (int64_t tile = first; tile < last;) {
    const int64_t num_tiles = tile + TILES <= last ? TILES : 1, output = tile * LANES, width = num_tiles * LANES;
    const int64_t count = std::min(width, out.num_outputs - output);
    multiply<DTYPE, ROWS, TILES>(rows, out.weight, out.num_tiles(), x, tile, num_tiles, count, result);
    if (out.up.tiles) {  // both are rounded first, as if they had been written
      multiply<DTYPE, ROWS, TILES>(rows, out.up, out.num_tiles(), x, tile, num_tiles, count, up);
      round_to(DTYPE, result, ROWS * width);
      round_to(DTYPE, up, ROWS * width);
      swiglu(DTYPE, result, up, ROWS * width);
    }
    for (int64_t row = 0; row < ROWS; ++row)
      write_floats(out.memory, DTYPE, (first_row + row) * out.num_outputs + output, count, result + row * width);
    tile += num_tiles;
  }
}

struct Product {
  Rows rows;
  Output outputs[3];
  Plain plain = {};  // the weight of the first output, if it is not packed

  int64_t panels_of_chunk() const { return plain.numbers ? ROWS_PER_PACKING / MAX_ROWS : PANELS_PER_CHUNK; }
  int64_t panel_chunks() const { return divide_up(rows.num_panels(), panels_of_chunk()); }
  int64_t num_chunks() const {
    int64_t count = 0;
    for (const Output &out : outputs) count += out.num_chunks();
    return count * panel_chunks();
  }
};

// The panels from `panel` to `end` - 1 times the tiles first .. last - 1, which are packed first if they are not.
template <Dtype DTYPE> void multiply_tiles(const Product &product, Output out, int64_t first, int64_t last, int64_t panel, int64_t end) {
  const Rows &rows = product.rows;
  if (product.plain.numbers) {
    thread_local std::vector<uint8_t> packed;
    const int64_t bytes = (last - first) * rows.tile_bytes();
    if (packed.size() < static_cast<size_t>(bytes)) packed.resize(bytes);
    for (int64_t tile = first; tile < last; ++tile)
      pack_tile<DTYPE>(product.plain, out.num_outputs, rows.num_inputs, tile, packed.data() + (tile - first) * rows.tile_bytes());
    out.weight.tiles = packed.data(), out.weight.first_tile = first;
  }
  for (; panel < end; ++panel) multiply_panel<DTYPE, MAX_ROWS>(rows, out, panel, first, last);
}

// The tiles and panels that one thread takes at a time.
void multiply_chunk(const Product &product, int64_t chunk) {
  const Rows &rows = product.rows;
  const Output *out = product.outputs;
  int64_t tile = chunk / product.panel_chunks();
  for (; tile >= out->num_chunks(); ++out) tile -= out->num_chunks();
  const int64_t first = tile * TILES_PER_CHUNK, last = std::min(first + TILES_PER_CHUNK, out->num_tiles());
  const int64_t panel = chunk % product.panel_chunks() * product.panels_of_chunk();
  const int64_t end = std::min(panel + product.panels_of_chunk(), rows.num_panels());
  const auto multiply = rows.dtype == Dtype::float32    ? multiply_tiles<Dtype::float32>
                        : rows.dtype == Dtype::bfloat16 ? multiply_tiles<Dtype::bfloat16>
                                                        : multiply_tiles<Dtype::float16>;
  multiply(product, *out, first, last, panel, end);
}

void multiply_all(Product *products, int64_t num_products) {
  thread_local std::vector<char> kept;
  thread_local std::vector<int64_t> panels, chunks;
  panels.assign(1, 0), chunks.assign(1, 0);
  int64_t bytes = 0;
  for (const Product *product = products; product < products + num_products; ++product) {
    bytes += product->rows.panel_bytes();
    panels.push_back(panels.back() + product->rows.num_panels());
    chunks.push_back(chunks.back() + product->num_chunks());
  }
  if (kept.size() < static_cast<size_t>(bytes)) kept.resize(bytes);
  char *memory = kept.data();
  for (Product *product = products; product < products + num_products; ++product) {
    product->rows.panels = memory;
    memory += product->rows.panel_bytes();
  }
  parallel_for_each(panels, [&](int64_t product, int64_t panel) { fill_panel(products[product].rows, panel); });
  parallel_for_each(chunks, [&](int64_t product, int64_t chunk) { multiply_chunk(products[product], chunk); });
}

void multiply_all(Product product) {
  record([=] { multiply_all(product); });
  multiply_all(&product, 1);
}

}  // namespace

// w0 .. w2, whether each is compressed, their biases, results and numbers of outputs; what is not there has no outputs
extern "C" void matmul(const void *x, int32_t dtype, int64_t num_rows, int64_t num_inputs, const uint8_t *w0, int32_t compressed0,
                       const void *bias0, void *out0, int64_t n0, const uint8_t *w1, int32_t compressed1, const void *bias1, void *out1,
                       int64_t n1, const uint8_t *w2, int32_t compressed2, const void *bias2, void *out2, int64_t n2) {
  multiply_all({{Dtype(dtype), static_cast<const char *>(x), num_rows, num_inputs},
                {{{w0, compressed0, bias0}, {}, out0, n0}, {{w1, compressed1, bias1}, {}, out1, n1}, {{w2, compressed2, bias2}, {}, out2, n2}}});
}

extern "C" void matmul_swiglu(const void *x, int32_t dtype, int64_t num_rows, int64_t num_inputs, const uint8_t *gate,
                              int32_t gate_compressed, const void *gate_bias, const uint8_t *up, int32_t up_compressed, const void *up_bias,
                              void *out, int64_t num_outputs) {
  multiply_all({{Dtype(dtype), static_cast<const char *>(x), num_rows, num_inputs},
                {{{gate, gate_compressed, gate_bias}, {up, up_compressed, up_bias}, out, num_outputs}}});
}

// The rows starts[i] .. starts[i + 1] - 1 times weights[i], or gated by it times ups[i], if ups is not null; what has no rows is not read.
extern "C" void grouped_matmul(const void *x, int32_t dtype, int64_t num_inputs, const uint8_t *const *weights, const int32_t *compressed,
                               const uint8_t *const *ups, const int32_t *ups_compressed, const int64_t *starts, void *out,
                               int64_t num_weights, int64_t num_outputs) {
  record([=] { grouped_matmul(x, dtype, num_inputs, weights, compressed, ups, ups_compressed, starts, out, num_weights, num_outputs); });
  thread_local std::vector<Product> products;
  products.clear();
  for (int64_t i = 0; i < num_weights; ++i) {
    Rows rows{Dtype(dtype), static_cast<const char *>(x), starts[i + 1] - starts[i], num_inputs};
    rows.x += starts[i] * num_inputs * rows.element_bytes();
    char *to = static_cast<char *>(out) + starts[i] * num_outputs * rows.element_bytes();
    Weight weight{weights[i], compressed[i], nullptr}, up{};
    if (ups) up = {ups[i], ups_compressed[i], nullptr};
    if (rows.num_rows) products.push_back({rows, {{weight, up, to, num_outputs}}});
  }
  multiply_all(products.data(), products.size());
}

// For every head: its x [heads, rows, inputs] times its weight transposed, plus bias: out [heads, rows, outputs]. The strides of the weight
// count numbers; that of outputs or that of inputs is 1.
extern "C" void linear(const void *x, int32_t dtype, int64_t num_heads, int64_t num_rows, int64_t num_inputs, const void *weight,
                       int64_t head_stride, int64_t output_stride, int64_t input_stride, const void *bias, void *out, int64_t num_outputs) {
  record([=] {
    linear(x, dtype, num_heads, num_rows, num_inputs, weight, head_stride, output_stride, input_stride, bias, out, num_outputs);
  });
  thread_local std::vector<Product> products;
  products.clear();
  for (int64_t head = 0; head < num_heads; ++head) {
    Rows rows{Dtype(dtype), static_cast<const char *>(x), num_rows, num_inputs};
    const int64_t bytes = rows.element_bytes();
    rows.x += head * num_rows * num_inputs * bytes;
    char *to = static_cast<char *>(out) + head * num_rows * num_outputs * bytes;
    const Plain plain{static_cast<const char *>(weight) + head * head_stride * bytes, output_stride, input_stride};
    products.push_back({rows, {{{nullptr, 0, bias}, {}, to, num_outputs}}, plain});
  }
  multiply_all(products.data(), products.size());
}

// How many of `count` numbers have each upper byte: [256].
extern "C" void count_upper_bytes(const uint16_t *numbers, int64_t count, int64_t *counts) {
  constexpr int64_t NUMBERS_OF_CHUNK = 1 << 18;
  std::vector<int64_t> found(divide_up(count, NUMBERS_OF_CHUNK) * 256);
  parallel_for(divide_up(count, NUMBERS_OF_CHUNK), [&](int64_t chunk) {
    for (int64_t i = chunk * NUMBERS_OF_CHUNK; i < std::min((chunk + 1) * NUMBERS_OF_CHUNK, count); ++i)
      ++found[chunk * 256 + (numbers[i] >> 8)];
  });
  std::fill(counts, counts + 256, 0);
  for (size_t i = 0; i < found.size(); ++i) counts[i % 256] += found[i];
}

// Tiles of bfloat16 [tiles, steps, 16, 2] in 12 bits each; the upper bytes stand in `memory` already, which has room for all exceptions.
extern "C" void compress(const uint16_t *tiles, int64_t num_tiles, int64_t num_steps, uint8_t *memory) {
  const Compressed layout{num_tiles, num_steps};
  std::vector<std::vector<Exception>> exceptions(num_tiles);
  parallel_for(num_tiles, [&](int64_t tile) {
    exceptions[tile] = compress_tile(layout, memory, tiles + tile * num_steps * NUMBERS_OF_STEP, memory + layout.groups(tile));
  });
  uint32_t count = 0;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    std::memcpy(memory + layout.start(tile), &count, sizeof count);
    std::memcpy(memory + layout.exception(count), exceptions[tile].data(), exceptions[tile].size() * sizeof(Exception));
    count += exceptions[tile].size();
  }
}

extern "C" void decompress(const uint8_t *memory, int64_t num_tiles, int64_t num_steps, uint8_t *tiles) {
  const Compressed layout{num_tiles, num_steps};
  parallel_for(num_tiles, [&](int64_t tile) { decompress_tile(memory, layout, tile, tiles + tile * num_steps * vector_bytes(Dtype::bfloat16)); });
}
