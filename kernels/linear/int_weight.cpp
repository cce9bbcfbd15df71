// Products with integer weights, by dot products of bytes.
//
// M rows, K inputs, N outputs, G groups of inputs. A tile is 16 outputs, one per lane; a step is four inputs, the bytes
// of a lane. Sums of a segment (a group or a part of a group) are exact integers; segments are scaled and added in
// float32 in the order of inputs. So the bits of a row depend neither on other rows nor on how threads share the work.
//
// Activations that are not int8 are converted to 16-bit fixed point with a scale per row and segment: q = 256 high +
// low, two "limbs" of int8. Without dot products of bytes (AVX2) the 16 bits are multiplied directly; exact sums are
// equal either way.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../tiles.h"
#include "activations.h"
#include "products.h"

namespace {

constexpr int64_t VECTOR_BYTES = STEP * LANES;
constexpr int64_t PANELS_PER_CHUNK = 16;
#ifdef HAS_TILES
// The least rows for AMX tiles, which are faster from here on, with the same bits: with two limbs, with one limb.
constexpr int64_t ROWS_FOR_TILES[] = {5, 10};
#endif
constexpr int64_t PREFETCH_BYTES = 8192;  // distance, into the L2 cache: 0.9 of the time of 2048 bytes into the L1 cache, also for one row

// Rows as integers of LIMBS bytes, and their weights.
template <int LIMBS> struct Job {
  Product product;
  Layout layout;
  Activations<LIMBS> activations;

  int64_t tile_bytes() const { return layout.tile_bytes(); }
  int64_t tiles_of_chunk() const { return TILES_OF_CHUNK; }
  int64_t num_panels() const { return activations.num_panels; }
  int64_t num_fills() const { return num_panels(); }
  int64_t panels_of_chunk() const { return PANELS_PER_CHUNK; }
  int64_t panel_bytes() const { return activations.num_rows * activations.bytes_per_row; }
  void assign_memory(char *memory) { activations.memory = memory; }
};

// The addresses where a kernel starts to read.
struct Sources {
  const uint8_t *codes;  // of the first tile; tiles are tile_bytes apart
  int64_t tile_bytes;
  const float *scales;   // of the first tile and group; tiles are tile_scales apart, segments group_scales
  const int8_t *zeros;
  int64_t tile_scales, group_scales;
  const int32_t *x_words;
  const float *x_scales;
  const int32_t *x_sums;
  int64_t num_segments, num_vectors, last_vectors;  // vectors of codes per segment, and in the last segment
};

// Multiplies TILES tiles by ROWS rows; out [ROWS, TILES, 16]. Sums and totals fill the registers. Never inlined: inside
// other code, or with a branch for the zero points, the compiler keeps half of the sums in memory (2.2 times slower).
template <int BITS, int LIMBS, bool ZEROS, int ROWS, int TILES>
[[gnu::noinline]] void multiply_tiles(Sources from, float *out) {
  constexpr int STEPS = 8 / BITS, SUMS = sums_of(LIMBS);  // steps per vector of codes
  Floats totals[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) totals[row][t] = splat(0.0f);
  const int64_t scales_ahead = PREFETCH_BYTES / (from.num_vectors * VECTOR_BYTES) * from.group_scales;
  const uint8_t *near_end = from.codes + from.tile_bytes - PREFETCH_BYTES;  // from here on the prefetched tile is TILES tiles further
  for (int64_t segment = 0; segment < from.num_segments; ++segment) {
    Ints sums[ROWS][TILES][SUMS];
    UNROLL
    for (int t = 0; t < TILES; ++t)
      UNROLL
      for (int row = 0; row < ROWS; ++row) {
        const Ints begin = splat(from.x_sums[row]);  // corrects the offset of the codes
        sums[row][t][0] = ZEROS ? multiply(load_bytes(from.zeros + t * from.tile_scales), begin) : begin;
        if constexpr (SUMS == 2) sums[row][t][1] = splat(0);
      }
    const float *later_scales = from.scales + scales_ahead + (from.codes < near_end ? 0 : (TILES - 1) * from.tile_scales);
    UNROLL
    for (int t = 0; t < TILES; ++t) _mm_prefetch(reinterpret_cast<const char *>(later_scales + t * from.tile_scales), _MM_HINT_T1);
    const uint8_t *end = from.codes + (segment + 1 < from.num_segments ? from.num_vectors : from.last_vectors) * VECTOR_BYTES;
    for (; from.codes != end; from.codes += VECTOR_BYTES, from.x_words += STEPS * ROWS * step_words(LIMBS)) {
      const int64_t ahead = PREFETCH_BYTES + (from.codes < near_end ? 0 : (TILES - 1) * from.tile_bytes);
      Ints w[TILES];
      UNROLL
      for (int t = 0; t < TILES; ++t) {
        _mm_prefetch(reinterpret_cast<const char *>(from.codes + t * from.tile_bytes + ahead), _MM_HINT_T1);
        w[t] = load(from.codes + t * from.tile_bytes);
      }
      UNROLL
      for (int step = 0; step < STEPS; ++step) {
        decltype(factors_of(w[0])) w_step[TILES];
        UNROLL
        for (int t = 0; t < TILES; ++t)
          w_step[t] = factors_of(BITS == 8 ? w[t] : bit_and(step ? shift_right<4>(w[t]) : w[t], splat(0x0f0f0f0f)));
        UNROLL
        for (int row = 0; row < ROWS; ++row)
          UNROLL
          for (int part = 0; part < SUMS; ++part) {
            const auto x_step = splat_step(from.x_words + ((step * ROWS + row) * SUMS + part) * SUM_WORDS);
            UNROLL
            for (int t = 0; t < TILES; ++t) sums[row][t][part] = dot_bytes(sums[row][t][part], w_step[t], x_step);
          }
      }
    }
    UNROLL
    for (int t = 0; t < TILES; ++t) {
      const Floats scale = load(from.scales + t * from.tile_scales);
      UNROLL
      for (int row = 0; row < ROWS; ++row) {
        Ints sum = sums[row][t][0];
        if constexpr (SUMS == 2) sum = add(sum, shift_left<8>(sums[row][t][1]));
        const Floats scale_product = LIMBS == 2 ? multiply(scale, splat(from.x_scales[row])) : scale;
        totals[row][t] = multiply_add(to_floats(sum), scale_product, totals[row][t]);
      }
    }
    from.scales += from.group_scales, from.zeros += from.group_scales;
    from.x_sums += ROWS;
    if (LIMBS == 2) from.x_scales += ROWS;  // int8 rows have one scale
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t)
      store(out + (row * TILES + t) * LANES, LIMBS == 2 ? totals[row][t] : multiply(totals[row][t], splat(from.x_scales[row])));
}

// result [ROWS, tiles, 16] = the products with the tiles from `tile` on: `count` numbers per row, then zeros. The
// products are rounded to the dtype before the bias is added.
template <int BITS, int LIMBS, bool ZEROS, int ROWS, int TILES>
void multiply(const Job<LIMBS> &job, const Weight &weight, int64_t all_tiles, const Panel<LIMBS> &x, int64_t tile, int64_t num_tiles,
              int64_t count, float *result) {
  const Layout &layout = job.layout;
  const Activations<LIMBS> &activations = job.activations;
  const int64_t num_groups = layout.num_groups(), scale = tile * num_groups * LANES;
  const int64_t inputs_before_last = activations.segment * (activations.num_segments - 1);
  const auto tiles = num_tiles == TILES ? multiply_tiles<BITS, LIMBS, ZEROS, ROWS, TILES> : multiply_tiles<BITS, LIMBS, ZEROS, ROWS, 1>;
  tiles({weight.memory + tile * layout.tile_bytes(), layout.tile_bytes(), layout.scales(weight, all_tiles) + scale,
         layout.zeros(weight, all_tiles) + scale, num_groups * LANES, num_groups > 1 ? LANES : 0, x.words, x.scales, x.sums,
         activations.num_segments, activations.segment * BITS / (8 * STEP), (activations.num_steps * STEP - inputs_before_last) * BITS / (8 * STEP)},
        result);
  if (!weight.bias) return;
  round_to(job.product.rows.dtype, result, ROWS * num_tiles * LANES);
  add_bias(weight, job.product.rows.dtype, ROWS, tile, num_tiles, count, result);
}

// Multiplies one panel by tiles first to last - 1.
template <int BITS, int LIMBS, bool ZEROS, int ROWS>
void multiply_panel(const Job<LIMBS> &job, const Output &out, int64_t panel, int64_t first, int64_t last) {
  const Panel<LIMBS> x = job.activations.panel(panel);
  if constexpr (ROWS > 1)
    if (x.num_rows < ROWS) return multiply_panel<BITS, LIMBS, ZEROS, ROWS - 1>(job, out, panel, first, last);
  constexpr int FIT = ACCUMULATORS / (ROWS * (sums_of(LIMBS) + 1)), TILES = FIT >= 4 ? 4 : 1;
  write_tiles<ROWS, TILES>(out, job.product.rows.dtype, panel * job.activations.height, first, last,
                           [&](const Weight &weight, int64_t tile, int64_t num_tiles, int64_t count, float *result) {
                             multiply<BITS, LIMBS, ZEROS, ROWS, TILES>(job, weight, out.num_tiles(), x, tile, num_tiles, count, result);
                           });
}

template <int LIMBS> void multiply_item(const Job<LIMBS> &job, const WorkItem &item) {
  constexpr int ROWS = Panel<LIMBS>::MAX_ROWS;
  const auto multiply = job.layout.bits() == 8   ? multiply_panel<8, LIMBS, false, ROWS>
                        : job.layout.has_zeros ? multiply_panel<4, LIMBS, true, ROWS>
                                               : multiply_panel<4, LIMBS, false, ROWS>;
  for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel) multiply(job, *item.out, panel, item.first_tile, item.last_tile);
}

template <int LIMBS> void multiply_all(const Format &format, const std::vector<Product> &products) {
  thread_local std::vector<Job<LIMBS>> jobs;
  jobs.clear();
  for (const Product &product : products) {
    const Rows &rows = product.rows;
    const Layout layout{format, rows.num_inputs};
    jobs.push_back({product, layout, {rows.num_rows, rows.num_inputs, segment_of(layout, LIMBS), layout.num_steps(), layout.offset()}});
  }
  const auto fill = [](const Job<LIMBS> &job, int64_t number) {
    const Panel<LIMBS> panel = job.activations.panel(number);
    for (int64_t row = 0; row < panel.num_rows; ++row)
      fill_row<LIMBS>(job.activations, panel, row, job.product.rows, number * job.activations.height + row);
  };
  run(jobs, fill, multiply_item<LIMBS>);
}

}  // namespace

void multiply_int_weights(const Format &format, const std::vector<Product> &products) {
  if (products.empty()) return;
  const bool are_codes = products[0].rows.scales;
  const auto multiply = are_codes ? multiply_all<1> : multiply_all<2>;
#ifdef HAS_TILES
  thread_local std::vector<Product> few, many;
  few.clear(), many.clear();
  for (const Product &product : products) (product.rows.num_rows < ROWS_FOR_TILES[are_codes] ? few : many).push_back(product);
  if (!few.empty()) multiply(format, few);
  if (!many.empty()) multiply_int_weights_by_tiles(format, many);
#else
  multiply(format, products);
#endif
}
