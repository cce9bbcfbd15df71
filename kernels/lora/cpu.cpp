// y += scale * B (A x), each row with the adapter of its slot. kernels/lora/reference.py is the specification.
// Each element of A x is summed in one vector register in the order of inputs, and each element of y in the order of
// ranks. The order does not depend on other rows.
#include <algorithm>
#include <cstring>

#include "../operator.h"
#include "../rows.h"
#include "../simd.h"
#include "../threads.h"

namespace {

constexpr int64_t ROWS_AT_ONCE = 4;   // rows that share a loaded factor, if they have the same adapter
constexpr int64_t RANKS_AT_ONCE = 4;  // ranks that share a loaded row
constexpr int64_t RANKS_OF_UNIT = 8;  // ranks that justify another thread
constexpr int64_t OUTPUTS_OF_UNIT = 512;

// The number of registers that hold outputs of a row, if `rows` rows are computed at once.
constexpr int vectors_of(int64_t rows) { return ACCUMULATORS >= 16 ? 16 / rows : 4 / rows; }

template <Dtype DTYPE> using Number = std::conditional_t<DTYPE == Dtype::float32, float, uint16_t>;

template <Dtype DTYPE> Floats load_floats(const Number<DTYPE> *at) {
  if constexpr (DTYPE == Dtype::float32)
    return load(at);
  else if constexpr (DTYPE == Dtype::bfloat16)
    return as_floats(shift_left<16>(load_halves(at)));
  else
    return load_float16(at);
}

// Loads the first `count` lanes; the remaining lanes are 0.
template <Dtype DTYPE> Floats load_floats(const Number<DTYPE> *at, int64_t count) {
  if (count >= LANES) return load_floats<DTYPE>(at);
  alignas(64) Number<DTYPE> loaded[LANES] = {};
  std::copy_n(at, count, loaded);
  return load_floats<DTYPE>(loaded);
}

struct Arguments {
  void *y;
  int64_t y_stride;
  const void *x;
  int64_t x_stride;
  const void *a, *b;
  const int64_t *ranks;
  const float *scales;
  const int64_t *slots;
  float *hidden;
  int64_t num_rows, num_inputs, num_outputs, num_slots, max_rank;

  // The rank of the row's adapter; 0 without adapter.
  int64_t rank_of(int64_t row) const {
    const int64_t slot = slots[row];
    return slot < 0 || slot >= num_slots ? 0 : std::clamp<int64_t>(ranks[slot], 0, max_rank);
  }

  // Calls work<number of rows>(first row) for the rows of a group: once for all rows if they have the same adapter, else
  // once per row.
  template <class Work> void by_adapter(int64_t group, Work &&work) const {
    const int64_t first = group * ROWS_AT_ONCE, end = std::min(first + ROWS_AT_ONCE, num_rows);
    const bool share_adapter =
        end - first == ROWS_AT_ONCE && std::all_of(slots + first, slots + end, [&](int64_t slot) { return slot == slots[first]; });
    if (share_adapter)
      work.template operator()<ROWS_AT_ONCE>(first);
    else
      for (int64_t row = first; row < end; ++row) work.template operator()<1>(row);
  }
};

// Computes hidden[row, rank] for NUM_ROWS rows and NUM_RANKS ranks.
template <Dtype DTYPE, int64_t NUM_ROWS, int64_t NUM_RANKS> void shrink(const Arguments &args, int64_t row, int64_t rank) {
  const auto *x = static_cast<const Number<DTYPE> *>(args.x) + row * args.x_stride;
  const auto *a = static_cast<const Number<DTYPE> *>(args.a) + (args.slots[row] * args.max_rank + rank) * args.num_inputs;
  Floats sums[NUM_ROWS][NUM_RANKS];
  for (auto &row_sums : sums) std::fill_n(row_sums, NUM_RANKS, splat(0.0f));
  for (int64_t i = 0; i < args.num_inputs; i += LANES) {
    const int64_t left = args.num_inputs - i;
    Floats factors[NUM_RANKS];
    UNROLL for (int64_t r = 0; r < NUM_RANKS; ++r) factors[r] = load_floats<DTYPE>(a + r * args.num_inputs + i, left);
    UNROLL for (int64_t t = 0; t < NUM_ROWS; ++t) {
      const Floats part = load_floats<DTYPE>(x + t * args.x_stride + i, left);
      UNROLL for (int64_t r = 0; r < NUM_RANKS; ++r) sums[t][r] = multiply_add(part, factors[r], sums[t][r]);
    }
  }
  for (int64_t t = 0; t < NUM_ROWS; ++t)
    for (int64_t r = 0; r < NUM_RANKS; ++r) args.hidden[(row + t) * args.max_rank + rank + r] = sum(sums[t][r]);
}

// Computes y for NUM_ROWS rows and `count` outputs, at most vectors_of(NUM_ROWS) registers.
template <Dtype DTYPE, int64_t NUM_ROWS> void expand(const Arguments &args, int64_t row, int64_t output, int64_t count) {
  constexpr int VECTORS = vectors_of(NUM_ROWS);
  const int64_t slot = args.slots[row], rank = args.rank_of(row);
  const auto *b = static_cast<const Number<DTYPE> *>(args.b) + slot * args.max_rank * args.num_outputs + output;
  const float *hidden = args.hidden + row * args.max_rank;
  Floats sums[NUM_ROWS][VECTORS];
  for (auto &row_sums : sums) std::fill_n(row_sums, VECTORS, splat(0.0f));
  for (int64_t r = 0; r < rank; ++r, b += args.num_outputs)
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      if (v * LANES >= count) break;
      const Floats factors = load_floats<DTYPE>(b + v * LANES, count - v * LANES);
      UNROLL for (int64_t t = 0; t < NUM_ROWS; ++t)
        sums[t][v] = multiply_add(splat(hidden[t * args.max_rank + r]), factors, sums[t][v]);
    }
  const Floats scale = splat(args.scales[slot]);
  for (int64_t t = 0; t < NUM_ROWS; ++t) {
    const int64_t first = (row + t) * args.y_stride + output;
    alignas(64) float values[VECTORS * LANES] = {};
    read_floats(args.y, DTYPE, first, count, values);
    for (int v = 0; v < VECTORS; ++v) store(values + v * LANES, multiply_add(sums[t][v], scale, load(values + v * LANES)));
    write_floats(args.y, DTYPE, first, count, values);
  }
}

template <Dtype DTYPE> void add(const Arguments &args) {
  const int64_t groups = divide_up(args.num_rows, ROWS_AT_ONCE), parts = divide_up(args.max_rank, RANKS_OF_UNIT);
  parallel_for(groups * parts, [&](int64_t unit) {
    const int64_t begin = unit % parts * RANKS_OF_UNIT;
    args.by_adapter(unit / parts, [&]<int64_t NUM_ROWS>(int64_t row) {
      const int64_t end = std::min(begin + RANKS_OF_UNIT, args.rank_of(row));
      int64_t rank = begin;
      for (; rank + RANKS_AT_ONCE <= end; rank += RANKS_AT_ONCE) shrink<DTYPE, NUM_ROWS, RANKS_AT_ONCE>(args, row, rank);
      for (; rank < end; ++rank) shrink<DTYPE, NUM_ROWS, 1>(args, row, rank);
    });
  });
  const int64_t pieces = divide_up(args.num_outputs, OUTPUTS_OF_UNIT);
  parallel_for(groups * pieces, [&](int64_t unit) {
    const int64_t begin = unit % pieces * OUTPUTS_OF_UNIT, end = std::min(begin + OUTPUTS_OF_UNIT, args.num_outputs);
    args.by_adapter(unit / pieces, [&]<int64_t NUM_ROWS>(int64_t row) {
      constexpr int64_t STEP = vectors_of(NUM_ROWS) * LANES;
      if (args.rank_of(row))
        for (int64_t output = begin; output < end; output += STEP) expand<DTYPE, NUM_ROWS>(args, row, output, std::min(STEP, end - output));
    });
  });
}

}  // namespace

// y [rows, outputs] and x [rows, inputs] with strides from row to row, in elements; a [slots, max_rank, inputs] and b
// [slots, max_rank, outputs] of the same dtype; ranks and scales [slots], slots [rows], hidden [rows, max_rank].
OPERATOR(lora_add, (void *y, int64_t y_stride, const void *x, int64_t x_stride, Dtype dtype, const void *a, const void *b,
                    const int64_t *ranks, const float *scales, const int64_t *slots, float *hidden, int64_t num_rows,
                    int64_t num_inputs, int64_t num_outputs, int64_t num_slots, int64_t max_rank)) {
  const Arguments args{y, y_stride, x, x_stride, a, b, ranks, scales, slots, hidden, num_rows, num_inputs, num_outputs, num_slots, max_rank};
  bool any = false;
  for (int64_t row = 0; row < num_rows; ++row) any |= args.rank_of(row) > 0;
  if (!any) return;
  if (dtype == Dtype::float32)
    add<Dtype::float32>(args);
  else if (dtype == Dtype::bfloat16)
    add<Dtype::bfloat16>(args);
  else
    add<Dtype::float16>(args);
}
