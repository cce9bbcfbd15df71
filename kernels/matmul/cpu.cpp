// x [M, K] times W [N, K] transposed, plus bias [N]; kernels/matmul/reference.py is the specification.
//
// M rows, K inputs, N outputs. A tile is 16 outputs, one for each lane; a step is what 32 bits hold of the inputs: one float32 or two
// bfloat16. Every output is one sum over the steps in their order, kept in a register from the first to the last, so a row's bits depend
// neither on the other rows nor on how the work was shared.
#include <algorithm>
#include <vector>

#include "../rows.h"
#include "../simd.h"
#include "../recording.h"
#include "../threads.h"

namespace {

constexpr int64_t STEP_BYTES = 4;
constexpr int64_t VECTOR_BYTES = LANES * STEP_BYTES;
constexpr int64_t TILES_PER_CHUNK = 4;
constexpr int64_t PANELS_PER_CHUNK = 16;
constexpr int MAX_ROWS = ACCUMULATORS / 2;  // of a panel: two tiles of it fill the registers

struct Product {
  Dtype dtype;
  const char *x;
  const uint8_t *weight;  // packed: [tiles, steps, 16, 4 bytes]
  const void *bias;       // null if there is none
  void *out;
  int64_t num_rows, num_inputs, num_outputs;
  char *panels = nullptr;  // x, up to MAX_ROWS rows together: [steps, rows, 4 bytes] each

  int64_t element_bytes() const { return dtype == Dtype::float32 ? 4 : 2; }
  int64_t num_steps() const { return divide_up(num_inputs * element_bytes(), STEP_BYTES); }
  int64_t num_tiles() const { return divide_up(num_outputs, LANES); }
  int64_t tile_bytes() const { return num_steps() * VECTOR_BYTES; }
  int64_t num_panels() const { return divide_up(num_rows, MAX_ROWS); }
  int64_t height() const { return divide_up(num_rows, std::max<int64_t>(num_panels(), 1)); }
};

void fill_panel(const Product &product, int64_t panel) {
  const int64_t first = panel * product.height(), height = std::min(product.height(), product.num_rows - first);
  const int64_t row_bytes = product.num_inputs * product.element_bytes(), num_steps = product.num_steps();
  auto *to = reinterpret_cast<int32_t *>(product.panels) + first * num_steps;
  for (int64_t row = 0; row < height; ++row) {
    const char *from = product.x + (first + row) * row_bytes;
    for (int64_t step = 0; step < row_bytes / STEP_BYTES; ++step)
      std::memcpy(to + step * height + row, from + step * STEP_BYTES, STEP_BYTES);
    if (const int64_t rest = row_bytes % STEP_BYTES) {  // an odd number of bfloat16
      int32_t last = 0;
      std::memcpy(&last, from + row_bytes - rest, rest);
      to[(num_steps - 1) * height + row] = last;
    }
  }
}

// result [ROWS, TILES, 16] = the products of ROWS rows and TILES tiles. Never inlined: among other code the compiler keeps half of the sums
// in memory (2.2 times slower).
template <Dtype DTYPE, int ROWS, int TILES>
[[gnu::noinline]] void dot(const uint8_t *weight, int64_t tile_bytes, const int32_t *x, int64_t num_steps, float *result) {
  Floats sums[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) sums[row][t] = splat(0.0f);
  for (int64_t step = 0; step < num_steps; ++step, weight += VECTOR_BYTES, x += ROWS) {
    Ints w[TILES];
    UNROLL
    for (int t = 0; t < TILES; ++t) {
      if (ROWS <= 8) _mm_prefetch(reinterpret_cast<const char *>(weight + t * tile_bytes + 2048), _MM_HINT_T0);
      w[t] = load(weight + t * tile_bytes);
    }
    UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const Ints x_step = splat(x[row]);
      UNROLL
      for (int t = 0; t < TILES; ++t)
        sums[row][t] = DTYPE == Dtype::float32 ? multiply_add(as_floats(w[t]), as_floats(x_step), sums[row][t])
                                               : dot_bfloat16(sums[row][t], w[t], x_step);
    }
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) store(result + (row * TILES + t) * LANES, sums[row][t]);
}

// Panel number `panel`, ROWS high or less, times the tiles first .. last - 1.
template <Dtype DTYPE, int ROWS> void multiply_panel(const Product &product, int64_t panel, int64_t first, int64_t last) {
  const int64_t first_row = panel * product.height();
  if constexpr (ROWS > 1)
    if (std::min(product.height(), product.num_rows - first_row) < ROWS)
      return multiply_panel<DTYPE, ROWS - 1>(product, panel, first, last);
  constexpr int FIT = ACCUMULATORS / ROWS, TILES = FIT >= 4 ? 4 : 2;
  alignas(64) float result[ROWS * TILES * LANES], bias[TILES * LANES] = {};
  const auto *x = reinterpret_cast<const int32_t *>(product.panels) + first_row * product.num_steps();
  for (int64_t tile = first; tile < last;) {
    const int64_t num_tiles = tile + TILES <= last ? TILES : 1, output = tile * LANES;
    const auto multiply = num_tiles == TILES ? dot<DTYPE, ROWS, TILES> : dot<DTYPE, ROWS, 1>;
    multiply(product.weight + tile * product.tile_bytes(), product.tile_bytes(), x, product.num_steps(), result);
    const int64_t count = std::min(num_tiles * LANES, product.num_outputs - output);
    if (product.bias) read_floats(product.bias, DTYPE, output, count, bias);
    for (int64_t row = 0; row < ROWS; ++row) {
      float *numbers = result + row * num_tiles * LANES;
      for (int64_t i = 0; i < count && product.bias; ++i) numbers[i] += bias[i];
      write_floats(product.out, DTYPE, (first_row + row) * product.num_outputs + output, count, numbers);
    }
    tile += num_tiles;
  }
}

}  // namespace

extern "C" void matmul(const void *x, int32_t dtype, const uint8_t *weight, const void *bias, void *out, int64_t num_rows,
                       int64_t num_inputs, int64_t num_outputs) {
  record([=] { matmul(x, dtype, weight, bias, out, num_rows, num_inputs, num_outputs); });
  Product product{Dtype(dtype), static_cast<const char *>(x), weight, bias, out, num_rows, num_inputs, num_outputs};
  thread_local std::vector<char> kept;
  const size_t bytes = num_rows * product.num_steps() * STEP_BYTES;
  if (kept.size() < bytes) kept.resize(bytes);
  product.panels = kept.data();
  parallel_for(product.num_panels(), [&](int64_t panel) { fill_panel(product, panel); });
  const int64_t tile_chunks = divide_up(product.num_tiles(), TILES_PER_CHUNK);
  const int64_t panel_chunks = divide_up(product.num_panels(), PANELS_PER_CHUNK);
  parallel_for(tile_chunks * panel_chunks, [&](int64_t chunk) {
    const int64_t first = chunk / panel_chunks * TILES_PER_CHUNK, last = std::min(first + TILES_PER_CHUNK, product.num_tiles());
    const int64_t panel = chunk % panel_chunks * PANELS_PER_CHUNK, end = std::min(panel + PANELS_PER_CHUNK, product.num_panels());
    const auto multiply =
        product.dtype == Dtype::float32 ? multiply_panel<Dtype::float32, MAX_ROWS> : multiply_panel<Dtype::bfloat16, MAX_ROWS>;
    for (int64_t p = panel; p < end; ++p) multiply(product, p, first, last);
  });
}
