// Products with weights in ggml's blocks, by dot products of bytes. kernels/linear/block_weight.py defines their
// layout.
//
// M rows, K inputs, N outputs. A tile is 16 outputs, one per lane; a step is four inputs, the bytes of a lane; a unit
// is eight steps. Rows are int8 codes with a scale per 32 inputs, or are converted to 16-bit fixed point with a scale per
// group, as in int_weight.cpp. The sum of a group is an exact integer; groups are scaled and added in float32 in the order of inputs. So the bits of a row depend
// neither on other rows nor on how threads share the work.
#include <algorithm>
#include <vector>

#include "../tiles.h"
#include "block_weight.h"

namespace {

constexpr int64_t PANELS_PER_CHUNK = 16;
#ifdef HAS_TILES
constexpr int64_t ROWS_FOR_TILES = 16;  // least rows for AMX tiles; more than in int_weight.cpp, because weights are expanded to bytes first
#endif
constexpr int64_t PREFETCH_BYTES = 8192;  // distance, into the L2 cache, as in int_weight.cpp

// The addresses where a kernel starts to read.
struct Sources {
  const uint8_t *block;  // of the first tile; tiles are tile_bytes apart
  int64_t tile_bytes;
  const int32_t *x_words;
  const float *x_scales;
  const int32_t *x_sums;
};

// Rows of int8 are added in runs (`begin_run` in simd_*.h), which read one word of a row in a step.
template <int LIMBS> constexpr int WORDS = LIMBS == 1 ? 1 : step_words(LIMBS);

// The codes of the group that begins at step `first` of a unit; tiles are tile_bytes apart.
template <class Kind> struct GroupCodes {
  const uint8_t *unit;
  int64_t tile_bytes;
  int first;

  Ints at(int tile, int step) const { return codes_of<Kind>(unit + tile * tile_bytes, first + step); }
};

// Adds the products of a group to sums [ROWS, TILES, SUMS]. x: the words of the group's rows.
template <class Kind, int ROWS, int TILES, int SUMS>
[[gnu::always_inline]] inline void add_group(const GroupCodes<Kind> &codes, const int32_t *x, Ints (&sums)[ROWS][TILES][SUMS]) {
  UNROLL
  for (int step = 0; step < Kind::group / STEP; ++step) {
    decltype(factors_of(Ints())) w[TILES];
    UNROLL
    for (int t = 0; t < TILES; ++t) w[t] = factors_of(codes.at(t, step));
    UNROLL
    for (int row = 0; row < ROWS; ++row)
      UNROLL
      for (int part = 0; part < SUMS; ++part) {
        const auto x_step = splat_step(x + ((step * ROWS + row) * SUMS + part) * SUM_WORDS);
        UNROLL
        for (int t = 0; t < TILES; ++t) sums[row][t][part] = dot_bytes(sums[row][t][part], w[t], x_step);
      }
  }
}

// The same for rows of int8.
template <class Kind, int ROWS, int TILES>
[[gnu::always_inline]] inline void add_group_in_runs(const GroupCodes<Kind> &codes, const int32_t *x, Ints (&sums)[ROWS][TILES][1]) {
  constexpr int STEPS = Kind::group / STEP, RUN = std::min(steps_of_run(Kind::byte_bits), STEPS);
  UNROLL
  for (int begin = 0; begin < STEPS; begin += RUN) {
    Ints run[ROWS][TILES];
    UNROLL
    for (int row = 0; row < ROWS; ++row)
      UNROLL
      for (int t = 0; t < TILES; ++t) run[row][t] = begin_run<Kind::byte_bits>(sums[row][t][0]);
    UNROLL
    for (int step = begin; step < begin + RUN; ++step) {
      Ints w[TILES];
      UNROLL
      for (int t = 0; t < TILES; ++t) w[t] = codes.at(t, step);
      UNROLL
      for (int row = 0; row < ROWS; ++row) {
        const Ints x_step = splat(x[step * ROWS + row]);
        UNROLL
        for (int t = 0; t < TILES; ++t) run[row][t] = dot_codes<Kind::byte_bits>(run[row][t], w[t], x_step);
      }
    }
    UNROLL
    for (int row = 0; row < ROWS; ++row)
      UNROLL
      for (int t = 0; t < TILES; ++t) sums[row][t][0] = end_run<Kind::byte_bits>(sums[row][t][0], run[row][t]);
  }
}

// Multiplies TILES tiles by ROWS rows; out [ROWS, TILES, 16]. Never inlined: inside other code the compiler keeps sums
// in memory, as in int_weight.cpp.
template <class Kind, int LIMBS, int ROWS, int TILES> [[gnu::noinline]] void multiply_tiles(Sources from, float *out) {
  constexpr int SUMS = sums_of(LIMBS), GROUP_STEPS = Kind::group / STEP;
  constexpr int64_t SHARE = Kind::block_bytes / Kind::units;
  alignas(64) uint8_t expanded[TILES][Kind::expanded_bytes];
  Floats totals[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) totals[row][t] = splat(0.0f);
  const uint8_t *end = from.block + from.tile_bytes, *near_end = end - PREFETCH_BYTES;
  for (; from.block != end; from.block += Kind::block_bytes) {
    const int64_t ahead = PREFETCH_BYTES + (from.block < near_end ? 0 : (TILES - 1) * from.tile_bytes);
    UNROLL
    for (int t = 0; t < TILES; ++t) expand_scales<Kind>(from.block + t * from.tile_bytes, expanded[t]);
    const uint8_t *unit = from.block + Kind::head_bytes;
    for (int64_t number = 0; number < Kind::units; ++number, unit += Kind::unit_bytes) {
      UNROLL
      for (int t = 0; t < TILES; ++t)
        UNROLL
        for (int64_t byte = 0; byte < SHARE; byte += 64)
          _mm_prefetch(reinterpret_cast<const char *>(from.block + t * from.tile_bytes + ahead + number * SHARE + byte), _MM_HINT_T1);
      UNROLL
      for (int group = 0; group < Kind::groups_of_unit; ++group) {
        Ints sums[ROWS][TILES][SUMS];
        UNROLL
        for (int row = 0; row < ROWS; ++row)
          UNROLL
          for (int t = 0; t < TILES; ++t) {
            sums[row][t][0] = splat(Kind::has_minimums ? 0 : from.x_sums[row]);  // corrects the offset of the codes
            if constexpr (SUMS == 2) sums[row][t][1] = splat(0);
          }
        const GroupCodes<Kind> codes{unit, from.tile_bytes, group * GROUP_STEPS};
        if constexpr (LIMBS == 1)
          add_group_in_runs(codes, from.x_words, sums);
        else
          add_group(codes, from.x_words, sums);
        UNROLL
        for (int t = 0; t < TILES; ++t) {
          const uint8_t *block = from.block + t * from.tile_bytes;
          const int64_t index = number * Kind::groups_of_unit + group;
          const Floats scale = scales_of<Kind>(block, expanded[t], index, 0);
          UNROLL
          for (int row = 0; row < ROWS; ++row) {
            Ints sum = sums[row][t][0];
            if constexpr (SUMS == 2) sum = add(sum, shift_left<8>(sums[row][t][1]));
            totals[row][t] = multiply_add(to_floats(sum), multiply(scale, splat(from.x_scales[row])), totals[row][t]);
            if constexpr (Kind::has_minimums)
              totals[row][t] = multiply_add(as_floats(splat(from.x_sums[row])), scales_of<Kind>(block, expanded[t], index, 1), totals[row][t]);
          }
        }
        from.x_words += GROUP_STEPS * ROWS * WORDS<LIMBS>;
        from.x_scales += ROWS, from.x_sums += ROWS;
      }
    }
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) store(out + (row * TILES + t) * LANES, totals[row][t]);
}

// Rows as fixed point, and their weights.
template <class Kind, int LIMBS> struct Job {
  Product product;
  Activations<LIMBS, WORDS<LIMBS>> activations;

  explicit Job(const Product &of)
      : product(of), activations{of.rows.num_rows, of.rows.num_inputs, Kind::group, of.rows.num_inputs / STEP, Kind::offset} {}
  int64_t tile_bytes() const { return activations.num_inputs / Kind::block * Kind::block_bytes; }
  int64_t tiles_of_chunk() const { return TILES_OF_CHUNK; }
  int64_t num_panels() const { return activations.num_panels; }
  int64_t num_fills() const { return num_panels(); }
  int64_t panels_of_chunk() const { return PANELS_PER_CHUNK; }
  int64_t panel_bytes() const { return activations.num_rows * activations.bytes_per_row; }
  void assign_memory(char *memory) { activations.memory = memory; }
};

// Multiplies one panel by tiles first to last - 1. The products are rounded to the dtype before the bias is
// added.
template <class Kind, int LIMBS, int ROWS> void multiply_panel(const Job<Kind, LIMBS> &job, const Output &out, int64_t panel, int64_t first, int64_t last) {
  const auto x = job.activations.panel(panel);
  if constexpr (ROWS > 1)
    if (x.num_rows < ROWS) return multiply_panel<Kind, LIMBS, ROWS - 1>(job, out, panel, first, last);
  constexpr int FIT = ACCUMULATORS / (ROWS * (sums_of(LIMBS) + 1)), TILES = FIT >= 4 ? 4 : 1;
  const Dtype dtype = job.product.rows.dtype;
  write_tiles<ROWS, TILES>(out, dtype, panel * job.activations.height, first, last,
                           [&](const Weight &weight, int64_t tile, int64_t num_tiles, int64_t count, float *result) {
    const auto tiles = num_tiles == TILES ? multiply_tiles<Kind, LIMBS, ROWS, TILES> : multiply_tiles<Kind, LIMBS, ROWS, 1>;
    tiles({weight.memory + tile * job.tile_bytes(), job.tile_bytes(), x.words, x.scales, x.sums}, result);
    multiply_by_global_scale<Kind>(weight.memory, out.num_tiles(), job.activations.num_inputs, ROWS * num_tiles * LANES, result);
    if (!weight.bias) return;
    round_to(dtype, result, ROWS * num_tiles * LANES);
    add_bias(weight, dtype, ROWS, tile, num_tiles, count, result);
  });
}

template <class Kind, int LIMBS> void multiply_all(const std::vector<Product> &products) {
  thread_local std::vector<Job<Kind, LIMBS>> jobs;
  jobs.clear();
  for (const Product &product : products) jobs.emplace_back(product);
  const auto fill = [](const Job<Kind, LIMBS> &job, int64_t number) {
    const auto panel = job.activations.panel(number);
    for (int64_t row = 0; row < panel.num_rows; ++row)
      fill_row_of_kind<Kind, LIMBS>(job.activations, panel, row, job.product.rows, number * job.activations.height + row);
  };
  run(jobs, fill, [](const Job<Kind, LIMBS> &job, const WorkItem &item) {
    for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel)
      multiply_panel<Kind, LIMBS, Panel<LIMBS>::MAX_ROWS>(job, *item.out, panel, item.first_tile, item.last_tile);
  });
}

}  // namespace

void multiply_block_weights(Codes codes, const std::vector<Product> &products) {
  std::vector<Product> few = products;
#ifdef HAS_TILES
  const auto are_many = [](const Product &product) { return product.rows.num_rows >= ROWS_FOR_TILES; };
  const auto many = std::stable_partition(few.begin(), few.end(), [&](const Product &product) { return !are_many(product); });
  if (many != few.end()) multiply_block_weights_by_tiles(codes, {many, few.end()});
  few.erase(many, few.end());
#endif
  if (few.empty()) return;
  with_kind(codes, [&](auto kind) {
    using Kind = decltype(kind);
    (few[0].rows.scales ? multiply_all<Kind, 1> : multiply_all<Kind, 2>)(few);
  });
}
