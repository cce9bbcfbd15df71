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

constexpr int64_t ROWS = 4;              // rows that share a loaded factor, if they have the same adapter
constexpr int64_t RANKS = 4;             // ranks that share a loaded row
constexpr int64_t RANKS_OF_UNIT = 8;     // ranks that justify another thread
constexpr int64_t OUTPUTS_OF_UNIT = 512;

// The number of registers of outputs per row, for this number of rows.
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

// The first `count` lanes; other lanes are 0.
template <Dtype DTYPE> Floats load_floats(const Number<DTYPE> *at, int64_t count) {
  if (count >= LANES) return load_floats<DTYPE>(at);
  alignas(64) Number<DTYPE> some[LANES] = {};
  std::copy_n(at, count, some);
  return load_floats<DTYPE>(some);
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

  // Calls each<count>(first row) for the rows of a group: once for all rows if they share an adapter, else once per
  // row.
  template <class Each> void by_adapter(int64_t group, Each &&each) const {
    const int64_t first = group * ROWS, end = std::min(first + ROWS, num_rows);
    const bool are_alike = end - first == ROWS && std::all_of(slots + first, slots + end, [&](int64_t slot) { return slot == slots[first]; });
    if (are_alike)
      each.template operator()<ROWS>(first);
    else
      for (int64_t row = first; row < end; ++row) each.template operator()<1>(row);
  }
};

// Computes hidden[row, rank] for COUNT rows and MANY ranks.
template <Dtype DTYPE, int64_t COUNT, int64_t MANY> void shrink(const Arguments &with, int64_t row, int64_t rank) {
  const auto *x = static_cast<const Number<DTYPE> *>(with.x) + row * with.x_stride;
  const auto *a = static_cast<const Number<DTYPE> *>(with.a) + (with.slots[row] * with.max_rank + rank) * with.num_inputs;
  Floats sums[COUNT][MANY];
  for (auto &each : sums) std::fill_n(each, MANY, splat(0.0f));
  for (int64_t i = 0; i < with.num_inputs; i += LANES) {
    const int64_t left = with.num_inputs - i;
    Floats factors[MANY];
    UNROLL for (int64_t r = 0; r < MANY; ++r) factors[r] = load_floats<DTYPE>(a + r * with.num_inputs + i, left);
    UNROLL for (int64_t t = 0; t < COUNT; ++t) {
      const Floats part = load_floats<DTYPE>(x + t * with.x_stride + i, left);
      UNROLL for (int64_t r = 0; r < MANY; ++r) sums[t][r] = multiply_add(part, factors[r], sums[t][r]);
    }
  }
  for (int64_t t = 0; t < COUNT; ++t)
    for (int64_t r = 0; r < MANY; ++r) with.hidden[(row + t) * with.max_rank + rank + r] = sum(sums[t][r]);
}

// Computes y for COUNT rows and `count` outputs, at most as many as the registers hold.
template <Dtype DTYPE, int64_t COUNT> void expand(const Arguments &with, int64_t row, int64_t output, int64_t count) {
  constexpr int VECTORS = vectors_of(COUNT);
  const int64_t slot = with.slots[row], rank = with.rank_of(row);
  const auto *b = static_cast<const Number<DTYPE> *>(with.b) + slot * with.max_rank * with.num_outputs + output;
  const float *hidden = with.hidden + row * with.max_rank;
  Floats sums[COUNT][VECTORS];
  for (auto &each : sums) std::fill_n(each, VECTORS, splat(0.0f));
  for (int64_t r = 0; r < rank; ++r, b += with.num_outputs)
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      if (v * LANES >= count) break;
      const Floats factors = load_floats<DTYPE>(b + v * LANES, count - v * LANES);
      UNROLL for (int64_t t = 0; t < COUNT; ++t)
        sums[t][v] = multiply_add(splat(hidden[t * with.max_rank + r]), factors, sums[t][v]);
    }
  const Floats scale = splat(with.scales[slot]);
  for (int64_t t = 0; t < COUNT; ++t) {
    const int64_t first = (row + t) * with.y_stride + output;
    alignas(64) float numbers[VECTORS * LANES] = {};
    read_floats(with.y, DTYPE, first, count, numbers);
    for (int v = 0; v < VECTORS; ++v) store(numbers + v * LANES, multiply_add(sums[t][v], scale, load(numbers + v * LANES)));
    write_floats(with.y, DTYPE, first, count, numbers);
  }
}

template <Dtype DTYPE> void add(const Arguments &with) {
  const int64_t groups = divide_up(with.num_rows, ROWS), parts = divide_up(with.max_rank, RANKS_OF_UNIT);
  parallel_for(groups * parts, [&](int64_t unit) {
    const int64_t begin = unit % parts * RANKS_OF_UNIT;
    with.by_adapter(unit / parts, [&]<int64_t COUNT>(int64_t row) {
      const int64_t end = std::min(begin + RANKS_OF_UNIT, with.rank_of(row));
      int64_t rank = begin;
      for (; rank + RANKS <= end; rank += RANKS) shrink<DTYPE, COUNT, RANKS>(with, row, rank);
      for (; rank < end; ++rank) shrink<DTYPE, COUNT, 1>(with, row, rank);
    });
  });
  const int64_t pieces = divide_up(with.num_outputs, OUTPUTS_OF_UNIT);
  parallel_for(groups * pieces, [&](int64_t unit) {
    const int64_t begin = unit % pieces * OUTPUTS_OF_UNIT, end = std::min(begin + OUTPUTS_OF_UNIT, with.num_outputs);
    with.by_adapter(unit / pieces, [&]<int64_t COUNT>(int64_t row) {
      constexpr int64_t STEP = vectors_of(COUNT) * LANES;
      if (with.rank_of(row))
        for (int64_t output = begin; output < end; output += STEP) expand<DTYPE, COUNT>(with, row, output, std::min(STEP, end - output));
    });
  });
}

}  // namespace

// y [rows, outputs] and x [rows, inputs] with strides from row to row, in elements; a [slots, max_rank, inputs] and b
// [slots, max_rank, outputs] of the same dtype; ranks and scales [slots], slots [rows], hidden [rows, max_rank].
OPERATOR(lora_add, (void *y, int64_t y_stride, const void *x, int64_t x_stride, Dtype dtype, const void *a, const void *b,
                    const int64_t *ranks, const float *scales, const int64_t *slots, float *hidden, int64_t num_rows,
                    int64_t num_inputs, int64_t num_outputs, int64_t num_slots, int64_t max_rank)) {
  const Arguments with{y, y_stride, x, x_stride, a, b, ranks, scales, slots, hidden, num_rows, num_inputs, num_outputs, num_slots, max_rank};
  bool any = false;
  for (int64_t row = 0; row < num_rows; ++row) any |= with.rank_of(row) > 0;
  if (!any) return;
  if (dtype == Dtype::float32)
    add<Dtype::float32>(with);
  else if (dtype == Dtype::bfloat16)
    add<Dtype::bfloat16>(with);
  else
    add<Dtype::float16>(with);
}
