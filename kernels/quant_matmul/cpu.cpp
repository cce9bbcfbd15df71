// x [M, K] times quantised W [N, K] transposed, by dot products of bytes; kernels/quant_matmul/reference.py is the specification.
//
// M rows, K inputs, N outputs, G groups of inputs. A tile is 16 outputs, one for each lane; a step is four inputs, the bytes of a lane.
// Sums of a segment (a group or a part of it) are exact integers; segments are scaled and added in float32 in the order of the inputs.
// So a row's bits depend neither on the other rows nor on how the work was shared.
//
// Activations that are not int8 become 16-bit fixed point with a scale for every row and segment, q = 256 high + low, two "limbs" of int8.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../rows.h"
#include "../simd.h"
#include "../recording.h"
#include "../threads.h"

namespace {

constexpr int64_t STEP = 4;
constexpr int64_t VECTOR_BYTES = STEP * LANES;
constexpr int64_t SEGMENT = 128;            // inputs that share a scale of fixed point, and whose sum fits 32 bits
constexpr int64_t TILES_PER_CHUNK = 4;
constexpr int64_t PANELS_PER_CHUNK = 32;
constexpr int32_t FIXED_POINT_MAX = 32512;  // 256 * 127: then both limbs fit a signed byte
constexpr float LEAST_NORMAL = 1e-33f;      // below it the reciprocal of the scale would overflow

// The packed weight; kernels/quant_matmul/packed.py describes its parts.
struct Weight {
  int64_t num_inputs, num_outputs, group_size;
  int bits;
  bool has_zeros;
  const uint8_t *codes;

  int64_t num_groups() const { return divide_up(num_inputs, group_size); }
  int64_t num_tiles() const { return divide_up(num_outputs, LANES); }
  int64_t num_steps() const { return divide_up(num_inputs, 2 * STEP) * 2; }
  int64_t whole_group() const { return group_size == num_inputs ? num_steps() * STEP : group_size; }
  int64_t tile_bytes() const { return num_steps() * STEP * LANES * bits / 8; }
  const float *scales() const { return reinterpret_cast<const float *>(codes + num_tiles() * tile_bytes()); }
  const int8_t *zeros() const { return reinterpret_cast<const int8_t *>(scales() + num_tiles() * num_groups() * LANES); }
  // What was added to symmetric codes, for bytes are unsigned: their zero point. 1 if every group has its own.
  int32_t offset() const { return has_zeros ? 1 : bits == 8 ? 128 : 8; }
};

// Up to MAX_ROWS rows of activations, step after step: bytes [num_steps, num_rows, LIMBS, 4].
template <int LIMBS> struct Panel {
  static constexpr int MAX_ROWS = std::max(1, ACCUMULATORS / 2 / (LIMBS + 1));  // of two tiles, with a total for each
  int64_t num_rows;
  int32_t *bytes;
  float *scales;  // [num_segments, num_rows]
  int32_t *sums;  // [num_segments, num_rows], of the integers, times the weight's offset if it has no zero points
};

// All rows of a call in panels of nearly equal height.
template <int LIMBS> struct Activations {
  int64_t num_rows, num_inputs, segment, num_steps;
  int32_t offset;
  int64_t num_segments = divide_up(num_inputs, segment);
  int64_t num_panels = divide_up(num_rows, Panel<LIMBS>::MAX_ROWS);
  int64_t height = divide_up(num_rows, std::max<int64_t>(num_panels, 1));
  int64_t bytes_per_row = num_steps * LIMBS * STEP + num_segments * 8;
  char *memory = nullptr;

  void allocate() {
    thread_local std::vector<char> kept;
    if (kept.size() < static_cast<size_t>(num_rows * bytes_per_row)) kept.resize(num_rows * bytes_per_row);
    memory = kept.data();
  }

  Panel<LIMBS> panel(int64_t index) const {
    const int64_t rows = std::min(height, num_rows - index * height);
    char *at = memory + index * height * bytes_per_row;
    auto *scales = reinterpret_cast<float *>(at + rows * num_steps * LIMBS * STEP);
    return {rows, reinterpret_cast<int32_t *>(at), scales, reinterpret_cast<int32_t *>(scales + rows * num_segments)};
  }
};

// --- activations ---

// The largest magnitude of `count` floats, a multiple of 16; not finite if any of them is not (bits of magnitudes compare like integers).
float largest_magnitude(const float *x, int64_t count) {
  Ints magnitude = splat(0);
  for (int64_t i = 0; i < count; i += LANES) magnitude = larger(magnitude, bit_and(as_ints(load(x + i)), splat(0x7fffffff)));
  const int32_t bits = largest(magnitude);
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// One row as fixed point. x is padded with zeros to a multiple of 16.
void fix_row(const Activations<2> &all, const Panel<2> &panel, int64_t row, const float *x) {
  for (int64_t segment = 0; segment < all.num_segments; ++segment) {
    const int64_t begin = segment * all.segment, end = std::min(begin + all.segment, all.num_steps * STEP);
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
    for (int64_t step = 0; step < (end - begin) / STEP; ++step) {
      int32_t *at = panel.bytes + ((begin / STEP + step) * panel.num_rows + row) * 2;
      std::memcpy(at, low + step * STEP, STEP);
      std::memcpy(at + 1, high + step * STEP, STEP);
    }
    panel.scales[segment * panel.num_rows + row] = finite ? (normal ? magnitude / FIXED_POINT_MAX : 0.0f) : NAN;
    panel.sums[segment * panel.num_rows + row] = sum(total) * all.offset;
  }
}

// One row of int8 codes.
void take_row(const Activations<1> &all, const Panel<1> &panel, int64_t row, const int8_t *codes, float scale) {
  for (int64_t segment = 0; segment < all.num_segments; ++segment) {
    const int64_t begin = segment * all.segment, end = std::min(begin + all.segment, all.num_inputs);
    int32_t total = 0;
    for (int64_t i = begin; i < end; ++i) total += codes[i];
    panel.scales[segment * panel.num_rows + row] = scale;
    panel.sums[segment * panel.num_rows + row] = total * all.offset;
  }
  const int64_t whole = all.num_inputs / STEP;
  for (int64_t step = 0; step < whole; ++step) std::memcpy(panel.bytes + step * panel.num_rows + row, codes + step * STEP, STEP);
  for (int64_t step = whole; step < all.num_steps; ++step) {
    int32_t bytes = 0;
    std::memcpy(&bytes, codes + step * STEP, std::max<int64_t>(all.num_inputs - step * STEP, 0));
    panel.bytes[step * panel.num_rows + row] = bytes;
  }
}

// --- the product ---

// Where a kernel starts to read.
struct Sources {
  const uint8_t *codes;  // of the first tile; the next one is tile_bytes behind it
  int64_t tile_bytes;
  const float *scales;   // of the first tile and group; the next tile is tile_scales behind it, the next segment group_scales
  const int8_t *zeros;
  int64_t tile_scales, group_scales;
  const int32_t *x_bytes;
  const float *x_scales;
  const int32_t *x_sums;
  int64_t num_segments, num_vectors, last_vectors;  // vectors of codes in a segment, and in the last one
};

// TILES tiles of ROWS rows; out [ROWS, TILES, 16]. Sums and totals fill the registers. Never inlined: among other code, or with a branch
// for the zero points, the compiler keeps half of them in memory (2.2 times slower).
template <int BITS, int LIMBS, bool ZEROS, int ROWS, int TILES>
[[gnu::noinline]] void multiply_tiles(Sources from, float *out) {
  constexpr int STEPS = 8 / BITS;  // in a vector of codes
  Floats totals[ROWS][TILES];
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t) totals[row][t] = splat(0.0f);
  for (int64_t segment = 0; segment < from.num_segments; ++segment) {
    Ints sums[ROWS][TILES][LIMBS];
    UNROLL
    for (int row = 0; row < ROWS; ++row)
      UNROLL
      for (int t = 0; t < TILES; ++t)
        UNROLL
        for (int limb = 0; limb < LIMBS; ++limb) sums[row][t][limb] = splat(0);
    const uint8_t *end = from.codes + (segment + 1 < from.num_segments ? from.num_vectors : from.last_vectors) * VECTOR_BYTES;
    for (; from.codes != end; from.codes += VECTOR_BYTES, from.x_bytes += STEPS * ROWS * LIMBS) {
      Ints w[TILES];
      UNROLL
      for (int t = 0; t < TILES; ++t) {
        if (ROWS <= 4) _mm_prefetch(reinterpret_cast<const char *>(from.codes + t * from.tile_bytes + 2048), _MM_HINT_T0);
        w[t] = load(from.codes + t * from.tile_bytes);
      }
      UNROLL
      for (int step = 0; step < STEPS; ++step) {
        Ints w_step[TILES];
        UNROLL
        for (int t = 0; t < TILES; ++t)
          w_step[t] = BITS == 8 ? w[t] : bit_and(step ? shift_right<4>(w[t]) : w[t], splat(0x0f0f0f0f));
        UNROLL
        for (int row = 0; row < ROWS; ++row)
          UNROLL
          for (int limb = 0; limb < LIMBS; ++limb) {
            const Ints x_step = splat(from.x_bytes[(step * ROWS + row) * LIMBS + limb]);
            UNROLL
            for (int t = 0; t < TILES; ++t) sums[row][t][limb] = dot_bytes(sums[row][t][limb], w_step[t], x_step);
          }
      }
    }
    UNROLL
    for (int t = 0; t < TILES; ++t) {
      const Floats scale = load(from.scales + t * from.tile_scales);
      UNROLL
      for (int row = 0; row < ROWS; ++row) {
        Ints zeros = splat(from.x_sums[row]);
        if constexpr (ZEROS) zeros = multiply(load_bytes(from.zeros + t * from.tile_scales), zeros);
        Ints sum = subtract(sums[row][t][0], zeros);
        if constexpr (LIMBS == 2) sum = add(sum, shift_left<8>(sums[row][t][1]));
        const Floats both = LIMBS == 2 ? multiply(scale, splat(from.x_scales[row])) : scale;
        totals[row][t] = multiply_add(to_floats(sum), both, totals[row][t]);
      }
    }
    from.scales += from.group_scales, from.zeros += from.group_scales;
    from.x_sums += ROWS;
    if (LIMBS == 2) from.x_scales += ROWS;  // int8 has one for the whole row
  }
  UNROLL
  for (int row = 0; row < ROWS; ++row)
    UNROLL
    for (int t = 0; t < TILES; ++t)
      store(out + (row * TILES + t) * LANES, LIMBS == 2 ? totals[row][t] : multiply(totals[row][t], splat(from.x_scales[row])));
}

struct Output {
  void *memory;
  Dtype dtype;
};

// One panel times the tiles first .. last - 1.
template <int BITS, int LIMBS, bool ZEROS, int ROWS>
void multiply_panel(const Weight &weight, const Activations<LIMBS> &all, int64_t panel, int64_t first, int64_t last, Output out) {
  const Panel<LIMBS> x = all.panel(panel);
  if constexpr (ROWS > 1)
    if (x.num_rows < ROWS) return multiply_panel<BITS, LIMBS, ZEROS, ROWS - 1>(weight, all, panel, first, last, out);
  constexpr int FIT = ACCUMULATORS / (ROWS * (LIMBS + 1)), TILES = FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  alignas(64) float result[ROWS * TILES * LANES];
  const int64_t num_groups = weight.num_groups(), whole = all.segment * (all.num_segments - 1);
  for (int64_t tile = first; tile < last;) {
    const int64_t num_tiles = tile + TILES <= last ? TILES : 1, scale = tile * num_groups * LANES;
    const auto multiply =
        num_tiles == TILES ? multiply_tiles<BITS, LIMBS, ZEROS, ROWS, TILES> : multiply_tiles<BITS, LIMBS, ZEROS, ROWS, 1>;
    multiply({weight.codes + tile * weight.tile_bytes(), weight.tile_bytes(), weight.scales() + scale, weight.zeros() + scale,
              num_groups * LANES, num_groups > 1 ? LANES : 0, x.bytes, x.scales, x.sums, all.num_segments,
              all.segment * BITS / (8 * STEP), (all.num_steps * STEP - whole) * BITS / (8 * STEP)},
             result);
    const int64_t count = std::min(num_tiles * LANES, weight.num_outputs - tile * LANES);
    for (int64_t row = 0; row < ROWS; ++row)
      write_floats(out.memory, out.dtype, (panel * all.height + row) * weight.num_outputs + tile * LANES, count,
                   result + row * num_tiles * LANES);
    tile += num_tiles;
  }
}

template <int LIMBS> void multiply_all(const Weight &weight, const Activations<LIMBS> &all, Output out) {
  const int64_t tile_chunks = divide_up(weight.num_tiles(), TILES_PER_CHUNK), panel_chunks = divide_up(all.num_panels, PANELS_PER_CHUNK);
  parallel_for(tile_chunks * panel_chunks, [&](int64_t chunk) {
    const int64_t first = chunk / panel_chunks * TILES_PER_CHUNK, last = std::min(first + TILES_PER_CHUNK, weight.num_tiles());
    const int64_t panel = chunk % panel_chunks * PANELS_PER_CHUNK, end = std::min(panel + PANELS_PER_CHUNK, all.num_panels);
    constexpr int ROWS = Panel<LIMBS>::MAX_ROWS;
    const auto multiply = weight.bits == 8     ? multiply_panel<8, LIMBS, false, ROWS>
                          : weight.has_zeros ? multiply_panel<4, LIMBS, true, ROWS>
                                             : multiply_panel<4, LIMBS, false, ROWS>;
    for (int64_t p = panel; p < end; ++p) multiply(weight, all, p, first, last, out);
  });
}

// Prepares every row of every panel.
template <int LIMBS, class Prepare> void prepare_panels(const Activations<LIMBS> &all, Prepare &&prepare) {
  parallel_for(all.num_panels, [&](int64_t p) {
    const Panel<LIMBS> panel = all.panel(p);
    for (int64_t row = 0; row < panel.num_rows; ++row) prepare(panel, row, p * all.height + row);
  });
}

float *row_buffer(int64_t count) {
  thread_local std::vector<float> kept;
  const size_t padded = divide_up(count, LANES) * LANES;
  if (kept.size() < padded) kept.resize(padded);
  std::fill(kept.data() + count, kept.data() + padded, 0.0f);
  return kept.data();
}

}  // namespace

extern "C" void quant_matmul(const void *x, int32_t dtype, const uint8_t *blob, void *out, int64_t num_rows, int64_t num_inputs,
                             int64_t num_outputs, int64_t group_size, int32_t bits, int32_t has_zeros) {
  record([=] { quant_matmul(x, dtype, blob, out, num_rows, num_inputs, num_outputs, group_size, bits, has_zeros); });
  const Weight weight{num_inputs, num_outputs, group_size, bits, has_zeros != 0, blob};
  Activations<2> all{num_rows, num_inputs, std::min(weight.whole_group(), SEGMENT), weight.num_steps(), weight.offset()};
  all.allocate();
  prepare_panels(all, [&](const Panel<2> &panel, int64_t row, int64_t index) {
    float *floats = row_buffer(num_inputs);
    read_floats(x, Dtype(dtype), index * num_inputs, num_inputs, floats);
    fix_row(all, panel, row, floats);
  });
  multiply_all(weight, all, {out, Dtype(dtype)});
}

// scale_stride: 1 if every row has its scale, 0 if all share one
extern "C" void quant_matmul_int8(const int8_t *codes, const float *scales, int64_t scale_stride, const uint8_t *blob, void *out,
                                  int32_t dtype, int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int64_t group_size,
                                  int32_t bits, int32_t has_zeros) {
  record([=] {
    quant_matmul_int8(codes, scales, scale_stride, blob, out, dtype, num_rows, num_inputs, num_outputs, group_size, bits, has_zeros);
  });
  const Weight weight{num_inputs, num_outputs, group_size, bits, has_zeros != 0, blob};
  Activations<1> all{num_rows, num_inputs, weight.whole_group(), weight.num_steps(), weight.offset()};
  all.allocate();
  prepare_panels(all, [&](const Panel<1> &panel, int64_t row, int64_t index) {
    take_row(all, panel, row, codes + index * num_inputs, scales[index * scale_stride]);
  });
  multiply_all(weight, all, {out, Dtype(dtype)});
}

extern "C" void quantize_rows(const void *x, int32_t dtype, int8_t *codes, float *scales, int64_t num_rows, int64_t num_inputs) {
  record([=] { quantize_rows(x, dtype, codes, scales, num_rows, num_inputs); });
  parallel_for(divide_up(num_rows, 16), [&](int64_t chunk) {
    for (int64_t row = chunk * 16; row < std::min(chunk * 16 + 16, num_rows); ++row) {
      float *floats = row_buffer(num_inputs);
      read_floats(x, Dtype(dtype), row * num_inputs, num_inputs, floats);
      const float magnitude = largest_magnitude(floats, divide_up(num_inputs, LANES) * LANES);
      const bool finite = magnitude <= std::numeric_limits<float>::max();
      const float scale = finite ? magnitude / 127 : NAN, divisor = scale > 0 ? scale : 1.0f;
      scales[row] = finite ? divisor : scale;
      for (int64_t i = 0; i < num_inputs; i += LANES) {
        const Ints code = round_to_ints(divide(load(floats + i), splat(divisor)));
        alignas(16) int8_t bytes[LANES];
        store_bytes(bytes, finite ? smaller(larger(code, splat(-127)), splat(127)) : splat(0));
        std::memcpy(codes + row * num_inputs + i, bytes, std::min(LANES, num_inputs - i));
      }
    }
  });
}
