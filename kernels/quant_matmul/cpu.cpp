// x [M, K] times quantised W [N, K] transposed, by dot products of bytes; kernels/quant_matmul/reference.py is the specification.
// Up to three weights of one format in one call, each with its own result: rows are prepared once, and threads meet once. Or two of them, gate
// and up, with one result, silu(gate) * up.
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

#include "../recording.h"
#include "../rows.h"
#include "../simd.h"
#include "../swiglu.h"
#include "../threads.h"
#include "activations.h"

namespace {

constexpr int64_t VECTOR_BYTES = STEP * LANES;
constexpr int64_t TILES_PER_CHUNK = 4;
constexpr int64_t PANELS_PER_CHUNK = 16;
constexpr int64_t PREFETCH_BYTES = 8192;  // ahead, into the second level: 0.9 of the time with 2048 into the first, also for one row

// What weights that are multiplied together have in common.
struct Format {
  int64_t num_inputs, group_size;
  int bits;
  bool has_zeros;

  int64_t num_groups() const { return divide_up(num_inputs, group_size); }
  int64_t num_steps() const { return divide_up(num_inputs, 2 * STEP) * 2; }
  int64_t whole_group() const { return group_size == num_inputs ? num_steps() * STEP : group_size; }
  int64_t tile_bytes() const { return num_steps() * STEP * LANES * bits / 8; }
  // What was added to symmetric codes, for bytes are unsigned: their zero point. 1 if every group has its own.
  int32_t offset() const { return has_zeros ? 1 : bits == 8 ? 128 : 8; }
};

// The packed weight; kernels/quant_matmul/packed.py describes its parts.
struct Weight {
  const uint8_t *codes;
  const void *bias;  // null if there is none

  const float *scales(const Format &format, int64_t num_tiles) const {
    return reinterpret_cast<const float *>(codes + num_tiles * format.tile_bytes());
  }
  const int8_t *zeros(const Format &format, int64_t num_tiles) const {
    return reinterpret_cast<const int8_t *>(scales(format, num_tiles) + num_tiles * format.num_groups() * LANES);
  }
};

struct Output {
  Weight weight, up;  // if up has codes, weight is the gate
  void *memory;
  int64_t num_outputs;

  int64_t num_tiles() const { return divide_up(num_outputs, LANES); }
  int64_t num_chunks() const { return divide_up(num_tiles(), TILES_PER_CHUNK); }
};

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
  const int64_t scales_ahead = PREFETCH_BYTES / (from.num_vectors * VECTOR_BYTES) * from.group_scales;
  const uint8_t *near_end = from.codes + from.tile_bytes - PREFETCH_BYTES;  // from here on the next tiles are fetched, TILES further on
  for (int64_t segment = 0; segment < from.num_segments; ++segment) {
    Ints sums[ROWS][TILES][LIMBS];
    UNROLL
    for (int t = 0; t < TILES; ++t)
      UNROLL
      for (int row = 0; row < ROWS; ++row) {
        const Ints begin = splat(from.x_sums[row]);  // what the codes are too large by
        sums[row][t][0] = ZEROS ? multiply(load_bytes(from.zeros + t * from.tile_scales), begin) : begin;
        if constexpr (LIMBS == 2) sums[row][t][1] = splat(0);
      }
    const float *later_scales = from.scales + scales_ahead + (from.codes < near_end ? 0 : (TILES - 1) * from.tile_scales);
    UNROLL
    for (int t = 0; t < TILES; ++t) _mm_prefetch(reinterpret_cast<const char *>(later_scales + t * from.tile_scales), _MM_HINT_T1);
    const uint8_t *end = from.codes + (segment + 1 < from.num_segments ? from.num_vectors : from.last_vectors) * VECTOR_BYTES;
    for (; from.codes != end; from.codes += VECTOR_BYTES, from.x_bytes += STEPS * ROWS * LIMBS) {
      const int64_t ahead = PREFETCH_BYTES + (from.codes < near_end ? 0 : (TILES - 1) * from.tile_bytes);
      Ints w[TILES];
      UNROLL
      for (int t = 0; t < TILES; ++t) {
        _mm_prefetch(reinterpret_cast<const char *>(from.codes + t * from.tile_bytes + ahead), _MM_HINT_T1);
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
        Ints sum = sums[row][t][0];
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

struct Product {
  Format format;
  Dtype dtype;  // of outputs and biases
  Output outputs[3];
};

// result [ROWS, tiles, 16] = what the tiles from `tile` on give: `count` numbers of each row, and zeros behind them. They are rounded before
// the bias is added, as if they had been written.
template <int BITS, int LIMBS, bool ZEROS, int ROWS, int TILES>
void multiply(const Product &product, const Output &out, const Weight &weight, const Activations<LIMBS> &all, const Panel<LIMBS> &x,
              int64_t tile, int64_t num_tiles, int64_t count, float *result) {
  const Format &format = product.format;
  const int64_t num_groups = format.num_groups(), scale = tile * num_groups * LANES, whole = all.segment * (all.num_segments - 1);
  const auto tiles = num_tiles == TILES ? multiply_tiles<BITS, LIMBS, ZEROS, ROWS, TILES> : multiply_tiles<BITS, LIMBS, ZEROS, ROWS, 1>;
  tiles({weight.codes + tile * format.tile_bytes(), format.tile_bytes(), weight.scales(format, out.num_tiles()) + scale,
         weight.zeros(format, out.num_tiles()) + scale, num_groups * LANES, num_groups > 1 ? LANES : 0, x.bytes, x.scales, x.sums,
         all.num_segments, all.segment * BITS / (8 * STEP), (all.num_steps * STEP - whole) * BITS / (8 * STEP)},
        result);
  if (!weight.bias) return;
  float bias[TILES * LANES];
  read_floats(weight.bias, product.dtype, tile * LANES, count, bias);
  round_to(product.dtype, result, ROWS * num_tiles * LANES);
  for (int64_t row = 0; row < ROWS; ++row)
    for (int64_t i = 0; i < count; ++i) result[row * num_tiles * LANES + i] += bias[i];
}

// One panel times the tiles first .. last - 1.
template <int BITS, int LIMBS, bool ZEROS, int ROWS>
void multiply_panel(const Product &product, const Output &out, const Activations<LIMBS> &all, int64_t panel, int64_t first, int64_t last) {
  const Panel<LIMBS> x = all.panel(panel);
  if constexpr (ROWS > 1)
    if (x.num_rows < ROWS) return multiply_panel<BITS, LIMBS, ZEROS, ROWS - 1>(product, out, all, panel, first, last);
  constexpr int FIT = ACCUMULATORS / (ROWS * (LIMBS + 1)), TILES = FIT >= 4 ? 4 : 1;
  alignas(64) float result[ROWS * TILES * LANES], up[ROWS * TILES * LANES];
  for (int64_t tile = first; tile < last;) {
    const int64_t num_tiles = tile + TILES <= last ? TILES : 1, width = num_tiles * LANES;
    const int64_t count = std::min(width, out.num_outputs - tile * LANES);
    multiply<BITS, LIMBS, ZEROS, ROWS, TILES>(product, out, out.weight, all, x, tile, num_tiles, count, result);
    if (out.up.codes) {
      multiply<BITS, LIMBS, ZEROS, ROWS, TILES>(product, out, out.up, all, x, tile, num_tiles, count, up);
      round_to(product.dtype, result, ROWS * width);
      round_to(product.dtype, up, ROWS * width);
      swiglu(product.dtype, result, up, ROWS * width);
    }
    for (int64_t row = 0; row < ROWS; ++row)
      write_floats(out.memory, product.dtype, (panel * all.height + row) * out.num_outputs + tile * LANES, count, result + row * width);
    tile += num_tiles;
  }
}

// Rows, and the weights that they are multiplied by.
template <int LIMBS> struct Job {
  Product product;
  Activations<LIMBS> all;
  int64_t first_row;

  int64_t panel_chunks() const { return divide_up(all.num_panels, PANELS_PER_CHUNK); }
  int64_t num_chunks() const {
    int64_t count = 0;
    for (const Output &out : product.outputs) count += out.num_chunks();
    return count * panel_chunks();
  }
};

// The tiles and panels that one thread takes at a time.
template <int LIMBS> void multiply_chunk(const Job<LIMBS> &job, int64_t chunk) {
  const Output *out = job.product.outputs;
  int64_t tile = chunk / job.panel_chunks();
  for (; tile >= out->num_chunks(); ++out) tile -= out->num_chunks();
  const int64_t first = tile * TILES_PER_CHUNK, last = std::min(first + TILES_PER_CHUNK, out->num_tiles());
  const int64_t panel = chunk % job.panel_chunks() * PANELS_PER_CHUNK, end = std::min(panel + PANELS_PER_CHUNK, job.all.num_panels);
  constexpr int ROWS = Panel<LIMBS>::MAX_ROWS;
  const auto multiply = job.product.format.bits == 8     ? multiply_panel<8, LIMBS, false, ROWS>
                        : job.product.format.has_zeros ? multiply_panel<4, LIMBS, true, ROWS>
                                                       : multiply_panel<4, LIMBS, false, ROWS>;
  for (int64_t p = panel; p < end; ++p) multiply(job.product, *out, job.all, p, first, last);
}

// prepare(all, panel, its row, the row of x) fills the panels.
template <int LIMBS, class Prepare> void multiply_all(std::vector<Job<LIMBS>> &jobs, Prepare &&prepare) {
  thread_local std::vector<char> kept;
  thread_local std::vector<int64_t> panels, chunks;
  panels.assign(1, 0), chunks.assign(1, 0);
  int64_t bytes = 0;
  for (const Job<LIMBS> &job : jobs) {
    bytes += job.all.num_rows * job.all.bytes_per_row;
    panels.push_back(panels.back() + job.all.num_panels);
    chunks.push_back(chunks.back() + job.num_chunks());
  }
  if (kept.size() < static_cast<size_t>(bytes)) kept.resize(bytes);
  char *memory = kept.data();
  for (Job<LIMBS> &job : jobs) job.all.memory = memory, memory += job.all.num_rows * job.all.bytes_per_row;
  parallel_for_each(panels, [&](int64_t index, int64_t p) {
    const Job<LIMBS> &job = jobs[index];
    const Panel<LIMBS> panel = job.all.panel(p);
    for (int64_t row = 0; row < panel.num_rows; ++row) prepare(job.all, panel, row, job.first_row + p * job.all.height + row);
  });
  parallel_for_each(chunks, [&](int64_t index, int64_t chunk) { multiply_chunk(jobs[index], chunk); });
}

// Weights of which each has rows of its own, starts[i] .. starts[i + 1] - 1; one without rows is not read.
struct Group {
  const uint8_t *const *weights, *const *ups;  // no ups: null
  const int64_t *starts;
  int64_t num_weights, num_outputs;
  char *out;
};

template <int LIMBS> std::vector<Job<LIMBS>> &begin_jobs() {
  thread_local std::vector<Job<LIMBS>> jobs;
  jobs.clear();
  return jobs;
}

template <int LIMBS> void add_job(std::vector<Job<LIMBS>> &jobs, const Product &product, int64_t first_row, int64_t num_rows) {
  const Format &f = product.format;
  const int64_t segment = LIMBS == 2 ? std::min(f.whole_group(), SEGMENT) : f.whole_group();
  jobs.push_back({product, {num_rows, f.num_inputs, segment, f.num_steps(), f.offset()}, first_row});
}

template <int LIMBS> std::vector<Job<LIMBS>> &jobs_of(const Format &format, Dtype dtype, const Group &group) {
  auto &jobs = begin_jobs<LIMBS>();
  for (int64_t i = 0; i < group.num_weights; ++i) {
    char *out = group.out + group.starts[i] * group.num_outputs * (dtype == Dtype::float32 ? 4 : 2);
    const Weight up{group.ups ? group.ups[i] : nullptr, nullptr};
    const Product product{format, dtype, {{{group.weights[i], nullptr}, up, out, group.num_outputs}}};
    if (group.starts[i] < group.starts[i + 1]) add_job(jobs, product, group.starts[i], group.starts[i + 1] - group.starts[i]);
  }
  return jobs;
}

// x of the products' dtype
void multiply_floats(const void *x, Dtype dtype, std::vector<Job<2>> &jobs) {
  multiply_all(jobs, [&](const Activations<2> &all, const Panel<2> &panel, int64_t row, int64_t index) {
    float *floats = row_buffer(all.num_inputs);
    read_floats(x, dtype, index * all.num_inputs, all.num_inputs, floats);
    fix_row(all, panel, row, floats);
  });
}

// scale_stride: 1 if every row has its scale, 0 if all share one
void multiply_codes(const int8_t *codes, const float *scales, int64_t scale_stride, std::vector<Job<1>> &jobs) {
  multiply_all(jobs, [&](const Activations<1> &all, const Panel<1> &panel, int64_t row, int64_t index) {
    take_row(all, panel, row, codes + index * all.num_inputs, scales[index * scale_stride]);
  });
}

void multiply_floats(const void *x, int64_t num_rows, const Product &product) {
  record([=] { multiply_floats(x, num_rows, product); });
  auto &jobs = begin_jobs<2>();
  add_job(jobs, product, 0, num_rows);
  multiply_floats(x, product.dtype, jobs);
}

void multiply_codes(const int8_t *codes, const float *scales, int64_t scale_stride, int64_t num_rows, const Product &product) {
  record([=] { multiply_codes(codes, scales, scale_stride, num_rows, product); });
  auto &jobs = begin_jobs<1>();
  add_job(jobs, product, 0, num_rows);
  multiply_codes(codes, scales, scale_stride, jobs);
}

}  // namespace

// w0 .. w2 with their biases, results and numbers of outputs; what is not there has no outputs
extern "C" void quant_matmul(const void *x, int32_t dtype, int64_t num_rows, int64_t num_inputs, int64_t group_size, int32_t bits,
                             int32_t has_zeros, const uint8_t *w0, const void *bias0, void *out0, int64_t n0, const uint8_t *w1,
                             const void *bias1, void *out1, int64_t n1, const uint8_t *w2, const void *bias2, void *out2, int64_t n2) {
  multiply_floats(x, num_rows,
                  {{num_inputs, group_size, bits, has_zeros != 0}, Dtype(dtype),
                   {{{w0, bias0}, {}, out0, n0}, {{w1, bias1}, {}, out1, n1}, {{w2, bias2}, {}, out2, n2}}});
}

extern "C" void quant_matmul_swiglu(const void *x, int32_t dtype, int64_t num_rows, int64_t num_inputs, int64_t group_size, int32_t bits,
                                    int32_t has_zeros, const uint8_t *gate, const void *gate_bias, const uint8_t *up, const void *up_bias,
                                    void *out, int64_t num_outputs) {
  multiply_floats(x, num_rows,
                  {{num_inputs, group_size, bits, has_zeros != 0}, Dtype(dtype), {{{gate, gate_bias}, {up, up_bias}, out, num_outputs}}});
}

extern "C" void quant_matmul_int8(const int8_t *codes, const float *scales, int64_t scale_stride, int32_t dtype, int64_t num_rows,
                                  int64_t num_inputs, int64_t group_size, int32_t bits, int32_t has_zeros, const uint8_t *w0,
                                  const void *bias0, void *out0, int64_t n0, const uint8_t *w1, const void *bias1, void *out1, int64_t n1,
                                  const uint8_t *w2, const void *bias2, void *out2, int64_t n2) {
  multiply_codes(codes, scales, scale_stride, num_rows,
                 {{num_inputs, group_size, bits, has_zeros != 0}, Dtype(dtype),
                  {{{w0, bias0}, {}, out0, n0}, {{w1, bias1}, {}, out1, n1}, {{w2, bias2}, {}, out2, n2}}});
}

extern "C" void quant_matmul_int8_swiglu(const int8_t *codes, const float *scales, int64_t scale_stride, int32_t dtype, int64_t num_rows,
                                         int64_t num_inputs, int64_t group_size, int32_t bits, int32_t has_zeros, const uint8_t *gate,
                                         const void *gate_bias, const uint8_t *up, const void *up_bias, void *out, int64_t num_outputs) {
  multiply_codes(codes, scales, scale_stride, num_rows,
                 {{num_inputs, group_size, bits, has_zeros != 0}, Dtype(dtype), {{{gate, gate_bias}, {up, up_bias}, out, num_outputs}}});
}

// weights, or gates and ups: of each its packed form
extern "C" void grouped_quant_matmul(const void *x, int32_t dtype, int64_t num_inputs, int64_t group_size, int32_t bits, int32_t has_zeros,
                                     const uint8_t *const *weights, const uint8_t *const *ups, const int64_t *starts, void *out,
                                     int64_t num_weights, int64_t num_outputs) {
  record([=] {
    grouped_quant_matmul(x, dtype, num_inputs, group_size, bits, has_zeros, weights, ups, starts, out, num_weights, num_outputs);
  });
  multiply_floats(x, Dtype(dtype),
                  jobs_of<2>({num_inputs, group_size, bits, has_zeros != 0}, Dtype(dtype),
                             {weights, ups, starts, num_weights, num_outputs, static_cast<char *>(out)}));
}

extern "C" void grouped_quant_matmul_int8(const int8_t *codes, const float *scales, int32_t dtype, int64_t num_inputs, int64_t group_size,
                                          int32_t bits, int32_t has_zeros, const uint8_t *const *weights, const uint8_t *const *ups,
                                          const int64_t *starts, void *out, int64_t num_weights, int64_t num_outputs) {
  record([=] {
    grouped_quant_matmul_int8(codes, scales, dtype, num_inputs, group_size, bits, has_zeros, weights, ups, starts, out, num_weights,
                              num_outputs);
  });
  multiply_codes(codes, scales, 1,
                 jobs_of<1>({num_inputs, group_size, bits, has_zeros != 0}, Dtype(dtype),
                            {weights, ups, starts, num_weights, num_outputs, static_cast<char *>(out)}));
}
