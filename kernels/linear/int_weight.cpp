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
#include "expanded.h"
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
  bool expands() const { return CAN_EXPAND && product.rows.num_rows >= ROWS_TO_EXPAND; }
  int64_t tiles_of_chunk() const { return expands() ? TILES_OF_EXPANSION : TILES_OF_CHUNK; }
  int64_t num_panels() const { return activations.num_panels; }
  int64_t num_fills() const { return num_panels(); }
  int64_t panels_of_chunk() const { return expands() ? panels_per_expansion(num_panels()) : PANELS_PER_CHUNK; }
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

// sums [ROWS, 16] += the products of steps of rows, words [num_steps, ROWS, 2], and of a tile, factors [num_steps, 2].
// Only for AVX2, where a vector has two registers. The empty assembly keeps the order of additions: else the compiler
// adds products first, and keeps the sums in memory (0.73 of the speed).
template <int ROWS, class Vector = Ints>
[[gnu::noinline]] void add_products(const int32_t *words, const Vector *factors, int64_t num_steps, int32_t *sums) {
  Vector of_rows[ROWS];
  UNROLL
  for (int row = 0; row < ROWS; ++row) of_rows[row] = load(reinterpret_cast<const uint8_t *>(sums + row * LANES));
  for (const Vector *end = factors + 2 * num_steps; factors != end; factors += 2, words += 2 * ROWS)
    UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const Vector w = factors[odd];
      UNROLL
      for (int row = 0; row < ROWS; ++row) {
        of_rows[row] = dot_shorts(of_rows[row], w, Vector(splat(words[2 * row + odd])));
        asm("" : "+x"(of_rows[row].low), "+x"(of_rows[row].high));
      }
    }
  UNROLL
  for (int row = 0; row < ROWS; ++row) store(reinterpret_cast<uint8_t *>(sums + row * LANES), of_rows[row]);
}

template <class Vector> void add_products(int64_t num_rows, const int32_t *words, const Vector *factors, int64_t num_steps, int32_t *sums) {
  constexpr void (*OF_ROWS[])(const int32_t *, const Vector *, int64_t, int32_t *) = {add_products<1>, add_products<2>, add_products<3>,
                                                                                      add_products<4>, add_products<5>, add_products<6>};
  OF_ROWS[num_rows - 1](words, factors, num_steps, sums);
}

// Expands steps of codes to factors of 16 bits [num_steps, 2].
template <int BITS, class Vector> void expand(const uint8_t *codes, int64_t num_steps, Vector *factors) {
  constexpr int STEPS = 8 / BITS;
  for (int64_t step = 0; step < num_steps; step += STEPS, codes += VECTOR_BYTES) {
    const Vector w = load(codes);
    UNROLL
    for (int i = 0; i < STEPS; ++i, factors += 2) {
      const auto both = factors_of(BITS == 8 ? w : bit_and(i ? shift_right<4>(w) : w, splat(0x0f0f0f0f)));
      factors[0] = both.even, factors[1] = both.odd;
    }
  }
}

// Begins the sums [num_rows, 16] of a segment with the correction of the codes' offset.
template <bool ZEROS> void begin_sums(const int32_t *x_sums, int64_t num_rows, const int8_t *zeros, int32_t *sums) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const Ints begin = splat(x_sums[row]);
    store(reinterpret_cast<uint8_t *>(sums + row * LANES), ZEROS ? ::multiply(load_bytes(zeros), begin) : begin);
  }
}

// results [num_rows, 16] += the scaled sums of a segment, as in multiply_tiles.
template <int LIMBS> void scale_sums(const int32_t *sums, int64_t num_rows, const float *scales, const float *x_scales, bool is_last, float *results) {
  const Floats scale = load(scales);
  for (int64_t row = 0; row < num_rows; ++row) {
    const Floats scale_product = LIMBS == 2 ? ::multiply(scale, splat(x_scales[row])) : scale;
    const Floats sum = to_floats(load(reinterpret_cast<const uint8_t *>(sums + row * LANES)));
    const Floats total = multiply_add(sum, scale_product, load(results + row * LANES));
    store(results + row * LANES, LIMBS == 1 && is_last ? ::multiply(total, splat(x_scales[row])) : total);
  }
}

// Multiplies the item's rows by its tiles of a weight: results [tiles, rows, 16].
template <int BITS, int LIMBS, bool ZEROS> void multiply_expanded(const Job<LIMBS> &job, const WorkItem &item, const Weight &weight, float *results) {
  thread_local std::vector<Ints> factors(INPUTS_OF_BLOCK / STEP * 2);
  thread_local std::vector<int32_t> sums_memory;
  const Layout &layout = job.layout;
  const Activations<LIMBS> &rows = job.activations;
  const int64_t num_tiles = item.last_tile - item.first_tile, first_row = item.first_panel * rows.height;
  const int64_t num_rows = std::min(item.last_panel * rows.height, rows.num_rows) - first_row, num_groups = layout.num_groups();
  const float *scales = layout.scales(weight, item.out->num_tiles());
  const int8_t *zeros = layout.zeros(weight, item.out->num_tiles());
  int32_t *const sums = aligned_buffer(sums_memory, num_tiles * num_rows * LANES);
  std::fill_n(results, num_tiles * num_rows * LANES, 0.0f);
  for (int64_t segment = 0; segment < rows.num_segments; ++segment) {
    const int64_t begin = segment * rows.segment / STEP, end = std::min(begin + rows.segment / STEP, rows.num_steps);
    for (int64_t first = begin, last; first < end; first = last) {
      last = std::min(first + INPUTS_OF_BLOCK / STEP, end);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t number = item.first_tile + tile, scale = (number * num_groups + (num_groups > 1 ? segment : 0)) * LANES;
        expand<BITS>(weight.memory + number * layout.tile_bytes() + first * VECTOR_BYTES * BITS / 8, last - first, factors.data());
        for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel) {
          const Panel<LIMBS> x = rows.panel(panel);
          const int64_t at = (tile * num_rows + panel * rows.height - first_row) * LANES;
          const float *x_scales = x.scales + (LIMBS == 2 ? segment * x.num_rows : 0);
          if (first == begin) begin_sums<ZEROS>(x.sums + segment * x.num_rows, x.num_rows, zeros + scale, sums + at);
          add_products(x.num_rows, x.words + first * x.num_rows * SUM_WORDS, factors.data(), last - first, sums + at);
          if (last == end) scale_sums<LIMBS>(sums + at, x.num_rows, scales + scale, x_scales, last == rows.num_steps, results + at);
        }
      }
    }
  }
}

template <int BITS, int LIMBS, bool ZEROS> void multiply_item_expanded(const Job<LIMBS> &job, const WorkItem &item) {
  const Activations<LIMBS> &rows = job.activations;
  const int64_t first = item.first_panel * rows.height, count = std::min(item.last_panel * rows.height, rows.num_rows) - first;
  write_expanded(job.product.rows, *item.out, item, first, count, true,
                 [&](const Weight &weight, float *results) { multiply_expanded<BITS, LIMBS, ZEROS>(job, item, weight, results); });
}

template <int LIMBS> void multiply_item(const Job<LIMBS> &job, const WorkItem &item) {
  if constexpr (CAN_EXPAND)
    if (job.expands()) {
      const auto multiply = job.layout.bits() == 8   ? multiply_item_expanded<8, LIMBS, false>
                            : job.layout.has_zeros ? multiply_item_expanded<4, LIMBS, true>
                                                   : multiply_item_expanded<4, LIMBS, false>;
      return multiply(job, item);
    }
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
    if (jobs.back().expands()) jobs.back().activations.split(MAX_EXPANDED_ROWS);
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
