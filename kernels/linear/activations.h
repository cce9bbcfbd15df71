// Rows of activations in the form that byte products read: int8 codes, or 16-bit fixed point.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../quantize_rows/quantize.h"
#include "../simd.h"
#include "products.h"

namespace {

constexpr int64_t STEP = 4;
constexpr int64_t SEGMENT = 128;            // inputs that share a fixed-point scale; the sum of their products fits into 32 bits
constexpr int32_t FIXED_POINT_MAX = 32512;  // 256 * 127: both limbs then fit into a signed byte
constexpr float LEAST_NORMAL = 1e-33f;      // the reciprocal of a smaller scale would overflow

// The layout of a packed weight, as in kernels/linear/int_weight.py.
struct Layout : Format {
  int64_t num_inputs;

  int64_t bits() const { return codes == Codes::int8 ? 8 : 4; }
  int64_t num_groups() const { return divide_up(num_inputs, group_size); }
  int64_t num_steps() const { return divide_up(num_inputs, 2 * STEP) * 2; }
  int64_t padded_group_size() const { return group_size == num_inputs ? num_steps() * STEP : group_size; }
  int64_t tile_bytes() const { return num_steps() * STEP * LANES * bits() / 8; }
  // The zero point of symmetric codes, which are stored as unsigned bytes. 1 if every group has a zero point.
  int32_t offset() const { return has_zeros ? 1 : bits() == 8 ? 128 : 8; }
  const float *scales(const Weight &weight, int64_t num_tiles) const {
    return reinterpret_cast<const float *>(weight.memory + num_tiles * tile_bytes());
  }
  const int8_t *zeros(const Weight &weight, int64_t num_tiles) const {
    return reinterpret_cast<const int8_t *>(scales(weight, num_tiles) + num_tiles * num_groups() * LANES);
  }
};

inline int64_t segment_of(const Layout &layout, int limbs) {
  return limbs == 2 ? std::min(layout.padded_group_size(), SEGMENT) : layout.padded_group_size();
}

// 32-bit words per step of a row.
constexpr int step_words(int limbs) { return sums_of(limbs) * SUM_WORDS; }

// Up to MAX_ROWS rows of activations in the order of steps: words [num_steps, num_rows, WORDS]. One word of a step is
// four bytes of int8; more words are limbs in the form of `put_limb`.
template <int LIMBS, int WORDS = step_words(LIMBS)> struct Panel {
  static constexpr int MAX_ROWS = std::max(1, ACCUMULATORS / (sums_of(LIMBS) + 1));  // sums and totals of one tile fit into the registers
  int64_t num_rows;
  int32_t *words;
  float *scales;  // [num_segments, num_rows]
  int32_t *sums;  // [num_segments, num_rows]: -offset times the sum of the integers

  // Writes `count` bytes of a limb of a row, starting at input `first`. Both are multiples of STEP.
  void put(int64_t row, int limb, int64_t first, int64_t count, const int8_t *from) const {
    int32_t *to = words + (first / STEP * num_rows + row) * WORDS;
    for (int64_t i = 0; i < count; i += STEP, to += num_rows * WORDS)
      if constexpr (WORDS == 1)
        std::memcpy(to, from + i, STEP);
      else
        put_limb(to, limb, from + i);
  }
};

// All rows of a call, in panels of nearly equal height.
template <int LIMBS, int WORDS = step_words(LIMBS)> struct Activations {
  int64_t num_rows, num_inputs, segment, num_steps;
  int32_t offset;
  int64_t num_segments = divide_up(num_inputs, segment);
  int64_t num_panels = divide_up(num_rows, Panel<LIMBS, WORDS>::MAX_ROWS);
  int64_t height = divide_up(num_rows, std::max<int64_t>(num_panels, 1));
  int64_t bytes_per_row = num_steps * WORDS * 4 + num_segments * 8;
  char *memory = nullptr;

  Panel<LIMBS, WORDS> panel(int64_t index) const {
    const int64_t rows = std::min(height, num_rows - index * height);
    char *at = memory + index * height * bytes_per_row;
    auto *scales = reinterpret_cast<float *>(at + rows * num_steps * WORDS * 4);
    return {rows, reinterpret_cast<int32_t *>(at), scales, reinterpret_cast<int32_t *>(scales + rows * num_segments)};
  }
};

// Converts one row to fixed point. x is padded with zeros to a multiple of 16.
template <class AllRows, class Panel> void to_fixed_point(const AllRows &all_rows, const Panel &panel, int64_t row, const float *x) {
  for (int64_t segment = 0; segment < all_rows.num_segments; ++segment) {
    const int64_t begin = segment * all_rows.segment, end = std::min(begin + all_rows.segment, all_rows.num_steps * STEP);
    const float magnitude = largest_magnitude(x + begin, divide_up(end - begin, LANES) * LANES);
    const bool finite = magnitude <= std::numeric_limits<float>::max(), normal = finite && magnitude > LEAST_NORMAL;
    const Floats inverse = splat(normal ? FIXED_POINT_MAX / magnitude : 0.0f);
    Ints total = splat(0);
    alignas(64) int8_t low[SEGMENT], high[SEGMENT];
    for (int64_t i = 0; i < end - begin; i += LANES) {
      const Ints q = round_to_ints(multiply(load(x + begin + i), inverse));
      const Ints low_byte = shift_right<24>(shift_left<24>(q));
      store_bytes(low + i, low_byte);
      store_bytes(high + i, shift_right<8>(subtract(q, low_byte)));
      total = add(total, q);
    }
    panel.put(row, 0, begin, end - begin, low);
    panel.put(row, 1, begin, end - begin, high);
    panel.scales[segment * panel.num_rows + row] = finite ? (normal ? magnitude / FIXED_POINT_MAX : 0.0f) : NAN;
    panel.sums[segment * panel.num_rows + row] = finite ? sum(total) * -all_rows.offset : 0;  // NaN and infinity are converted to INT32_MIN
  }
}

// Copies one row of int8 codes into a panel. A scale belongs to `inputs_of_scale` inputs: whole segments.
template <class AllRows, class Panel>
void copy_codes(const AllRows &all_rows, const Panel &panel, int64_t row, const int8_t *codes, const float *scales, int64_t inputs_of_scale) {
  for (int64_t segment = 0; segment < all_rows.num_segments; ++segment) {
    const int64_t begin = segment * all_rows.segment, end = std::min(begin + all_rows.segment, all_rows.num_inputs);
    int32_t total = 0;
    for (int64_t i = begin; i < end; ++i) total += codes[i];
    panel.scales[segment * panel.num_rows + row] = scales[begin / inputs_of_scale];
    panel.sums[segment * panel.num_rows + row] = total * -all_rows.offset;
  }
  const int64_t num_complete = all_rows.num_inputs / STEP * STEP;
  panel.put(row, 0, 0, num_complete, codes);
  for (int64_t input = num_complete; input < all_rows.num_steps * STEP; input += STEP) {
    int8_t last[STEP] = {};
    std::memcpy(last, codes + input, std::max<int64_t>(all_rows.num_inputs - input, 0));
    panel.put(row, 0, input, STEP, last);
  }
}

// Returns a buffer for one row of floats, padded with zeros.
float *row_buffer(int64_t count) {
  thread_local std::vector<float> buffer;
  const size_t padded = divide_up(count, LANES) * LANES;
  if (buffer.size() < padded) buffer.resize(padded);
  std::fill(buffer.data() + count, buffer.data() + padded, 0.0f);
  return buffer.data();
}

// Writes row number `index` of a product into row `row` of a panel.
template <int LIMBS, class AllRows, class Panel>
void fill_row(const AllRows &all_rows, const Panel &panel, int64_t row, const Rows &rows, int64_t index) {
  if constexpr (LIMBS == 2) {
    float *floats = row_buffer(rows.num_inputs);
    read_floats(rows.x, rows.dtype, index * rows.num_inputs, rows.num_inputs, floats);
    to_fixed_point(all_rows, panel, row, floats);
  } else {
    const int8_t *codes = static_cast<const int8_t *>(rows.x) + index * rows.num_inputs;
    copy_codes(all_rows, panel, row, codes, rows.scales + index * rows.scale_stride, rows.inputs_of_scale());
  }
}

}  // namespace
