// out += a^T b, or out -= a^T b. kernels/accumulate_product/reference.py is the specification.
//
// K rows, M channels of a, N channels of b. A step is one row of float32 or float16, or two rows of bfloat16. A product
// is the sum over STEPS steps, in their order, which is then added to `out`. The bits of an element therefore do not
// depend on its index or on threads.
#include <algorithm>
#include <vector>

#include "../aligned_buffer.h"
#include "../elements.h"
#include "../operator.h"
#include "../threads.h"

namespace {

constexpr int64_t STEPS = 128;  // a tile's 16 KB and a panel's 6 KB stay in the L1 cache
constexpr int TILES = ACCUMULATORS < 16 ? 1 : 2, HEIGHT = ACCUMULATORS / TILES;  // vectors and channels of a product
constexpr int64_t WIDTH = TILES * LANES;
constexpr int64_t PANELS_OF_CHUNK = 16, TILES_OF_CHUNK = 8;

struct Matrix {
  const char *numbers;
  int64_t stride, num_channels;  // stride: elements per row
  Dtype dtype;

  const void *row(int64_t index) const { return numbers + index * stride * (dtype == Dtype::float32 ? 4 : 2); }
};

// Loads 16 channels of a step. Rows from num_rows on are 0.
template <Dtype DTYPE> Ints load_step(const Matrix &x, int64_t num_rows, int64_t step, int64_t channel) {
  if constexpr (DTYPE == Dtype::bfloat16) {
    const Ints first = as_ints(load_elements<DTYPE>(x.row(2 * step), channel, x.num_channels));
    if (2 * step + 1 == num_rows) return bit_and(shift_right<16>(first), splat(0xffff));
    const Ints second = as_ints(load_elements<DTYPE>(x.row(2 * step + 1), channel, x.num_channels));
    return add(bit_and(shift_right<16>(first), splat(0xffff)), second);
  } else {
    return as_ints(load_elements<DTYPE>(x.row(step), channel, x.num_channels));
  }
}

// Packs `width` channels of steps `first` to `last` - 1, from `channel` on: [steps, width], and up to 15 more elements.
template <Dtype DTYPE> void pack(const Matrix &x, int64_t num_rows, int64_t first, int64_t last, int64_t channel, int64_t width, int32_t *to) {
  for (int64_t step = first; step < last; ++step, to += width)
    for (int64_t i = 0; i < width; i += LANES) store(reinterpret_cast<uint8_t *>(to + i), load_step<DTYPE>(x, num_rows, step, channel + i));
}

// result [HEIGHT, WIDTH] = the product of a panel [steps, HEIGHT] and a tile [steps, WIDTH]. Never inlined: the sums stay
// in registers.
template <Dtype DTYPE> [[gnu::noinline]] void multiply(const int32_t *a, const int32_t *b, int64_t num_steps, float *result) {
  Floats sums[HEIGHT][TILES];
  UNROLL
  for (int i = 0; i < HEIGHT; ++i)
    UNROLL
    for (int t = 0; t < TILES; ++t) sums[i][t] = splat(0.0f);
  for (int64_t step = 0; step < num_steps; ++step, a += HEIGHT, b += WIDTH) {
    Ints tile[TILES];
    UNROLL
    for (int t = 0; t < TILES; ++t) tile[t] = load(reinterpret_cast<const uint8_t *>(b + t * LANES));
    UNROLL
    for (int i = 0; i < HEIGHT; ++i) {
      const Ints factor = splat(a[i]);
      UNROLL
      for (int t = 0; t < TILES; ++t)
        sums[i][t] = DTYPE == Dtype::bfloat16 ? dot_bfloat16(sums[i][t], factor, tile[t])
                                              : multiply_add(as_floats(factor), as_floats(tile[t]), sums[i][t]);
    }
  }
  UNROLL
  for (int i = 0; i < HEIGHT; ++i)
    UNROLL
    for (int t = 0; t < TILES; ++t) store(result + i * WIDTH + t * LANES, sums[i][t]);
}

struct Output {
  float *numbers;
  int64_t stride;
  float sign;
  bool upper;
};

// Adds result [HEIGHT, WIDTH] to the elements of `out` from row i and column j on.
void add_result(const Output &out, const float *result, int64_t i, int64_t j, int64_t num_rows, int64_t num_columns) {
  for (int64_t row = i; row < std::min(i + HEIGHT, num_rows); ++row, result += WIDTH) {
    float *to = out.numbers + row * out.stride;
    for (int64_t column = out.upper ? std::max(row, j) : j; column < std::min(j + WIDTH, num_columns); ++column)
      to[column] += out.sign * result[column - j];
  }
}

template <Dtype DTYPE> void accumulate(const Matrix &a, const Matrix &b, int64_t num_rows, const Output &out) {
  constexpr int64_t ROWS_OF_STEP = DTYPE == Dtype::bfloat16 ? 2 : 1;
  const int64_t num_steps = divide_up(num_rows, ROWS_OF_STEP), num_panels = divide_up(a.num_channels, HEIGHT);
  const int64_t num_tiles = divide_up(b.num_channels, WIDTH), across = divide_up(num_tiles, TILES_OF_CHUNK);
  thread_local std::vector<int32_t> panels_memory, tiles_memory;
  int32_t *const panels = aligned_buffer(panels_memory, num_panels * HEIGHT * STEPS);
  int32_t *const tiles = aligned_buffer(tiles_memory, num_tiles * WIDTH * STEPS);
  for (int64_t first = 0; first < num_steps; first += STEPS) {
    const int64_t last = std::min(first + STEPS, num_steps);
    parallel_for(num_tiles, [&](int64_t tile) { pack<DTYPE>(b, num_rows, first, last, tile * WIDTH, WIDTH, tiles + tile * WIDTH * STEPS); });
    parallel_for(divide_up(num_panels, PANELS_OF_CHUNK), [&](int64_t chunk) {  // a panel overwrites the start of the next one of its chunk
      alignas(64) int32_t panel[HEIGHT * STEPS + LANES];
      for (int64_t p = chunk * PANELS_OF_CHUNK; p < std::min((chunk + 1) * PANELS_OF_CHUNK, num_panels); ++p) {
        pack<DTYPE>(a, num_rows, first, last, p * HEIGHT, HEIGHT, panel);
        std::memcpy(panels + p * HEIGHT * STEPS, panel, sizeof(int32_t) * HEIGHT * (last - first));
      }
    });
    parallel_for(divide_up(num_panels, PANELS_OF_CHUNK) * across, [&](int64_t chunk) {
      const int64_t first_panel = chunk / across * PANELS_OF_CHUNK, last_panel = std::min(first_panel + PANELS_OF_CHUNK, num_panels);
      const int64_t first_tile = chunk % across * TILES_OF_CHUNK, last_tile = std::min(first_tile + TILES_OF_CHUNK, num_tiles);
      alignas(64) float result[HEIGHT * WIDTH];
      for (int64_t tile = first_tile; tile < last_tile; ++tile)
        for (int64_t panel = first_panel; panel < last_panel; ++panel) {
          if (out.upper && (tile + 1) * WIDTH <= panel * HEIGHT) break;  // this panel and later ones are below the diagonal
          multiply<DTYPE>(panels + panel * HEIGHT * STEPS, tiles + tile * WIDTH * STEPS, last - first, result);
          add_result(out, result, panel * HEIGHT, tile * WIDTH, a.num_channels, b.num_channels);
        }
    });
  }
}

}  // namespace

// a [K, M] and b [K, N] of one dtype; out [M, N]. Strides are elements per row.
OPERATOR(accumulate_product, (const void *a, int64_t a_stride, const void *b, int64_t b_stride, float *out, int64_t out_stride, Dtype dtype,
                              int64_t num_rows, int64_t a_channels, int64_t b_channels, bool subtract, bool upper)) {
  const Matrix left{static_cast<const char *>(a), a_stride, a_channels, dtype}, right{static_cast<const char *>(b), b_stride, b_channels, dtype};
  for_dtype(dtype, [&]<Dtype DTYPE>() { accumulate<DTYPE>(left, right, num_rows, {out, out_stride, subtract ? -1.0f : 1.0f, upper}); });
}
