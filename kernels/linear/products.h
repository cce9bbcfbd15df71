// The operands of products, for all formats of weights, and how the threads of the pool share the work.
#pragma once

#include <algorithm>
#include <vector>

#include "../operator.h"
#include "../rows.h"
#include "../simd.h"
#include "../swiglu.h"
#include "../threads.h"
#include "plain.h"

constexpr int64_t TILES_OF_CHUNK = 4, MAX_TILES_OF_CHUNK = 8;

// Rows of activations [num_rows, num_inputs].
struct Rows {
  const void *x;        // of the dtype, or int8 codes
  const float *scales;  // of the codes; null if x has the dtype
  int64_t scale_stride;  // from row to row: the number of scales per row, or 0 if all rows share one scale
  Dtype dtype;           // of the product
  int64_t num_rows, num_inputs;

  int64_t out_bytes() const { return dtype == Dtype::float32 ? 4 : 2; }  // per number of the product
  int64_t inputs_of_scale() const { return num_inputs / std::max<int64_t>(scale_stride, 1); }
  // `count` rows, starting at row `first`.
  Rows part(int64_t first, int64_t count) const {
    const int64_t row_bytes = num_inputs * (scales ? 1 : out_bytes());
    return {static_cast<const char *>(x) + first * row_bytes, scales ? scales + first * scale_stride : nullptr, scale_stride, dtype, count, num_inputs};
  }
};

// The codes of a weight. none: floats of the rows' dtype. The numbers are in kernels/linear/int_weight.py.
enum class Codes : int32_t { none, int8, int4, float8, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q3_k, q4_0, q8_0, iq4_nl, iq4_xs, mxfp4, nvfp4 };

// The properties that weights must share, in addition to their inputs, to be multiplied together.
struct Format {
  int64_t group_size;  // inputs that share a scale
  Codes codes;
  bool has_zeros;
};

struct Weight {
  const uint8_t *memory;  // in the layout of kernels/linear/float_weight.py or int_weight.py
  bool is_compressed;     // 12-bit floats
  const void *bias;       // null if none
  int64_t first_tile = 0;  // number of the first tile in `memory`, if it holds only some tiles
};

struct Output {
  Weight weight, up;  // if `up` has memory, `weight` is the gate
  void *memory;
  int64_t num_outputs;

  int64_t num_tiles() const { return divide_up(num_outputs, LANES); }
  int64_t num_chunks(int64_t tiles_of_chunk) const { return divide_up(num_tiles(), tiles_of_chunk); }
};

struct Product {
  Rows rows;
  Output outputs[3];
  Plain plain = {};  // the weight of the first output, if it is not packed

  int64_t num_chunks(int64_t tiles_of_chunk) const {
    int64_t count = 0;
    for (const Output &out : outputs) count += out.num_chunks(tiles_of_chunk);
    return count;
  }
};

void multiply_float_weights(const std::vector<Product> &products);
void multiply_float8_weights(int64_t group_size, const std::vector<Product> &products);
void multiply_bfloat16_weights_by_tiles(const std::vector<Product> &products);  // only with HAS_TILES of kernels/tiles.h
void multiply_float8_weights_by_tiles(int64_t group_size, const std::vector<Product> &products);
void multiply_int_weights_by_tiles(const Format &format, const std::vector<Product> &products);
void multiply_int_weights(const Format &format, const std::vector<Product> &products);
void multiply_block_weights_by_tiles(Codes codes, const std::vector<Product> &products);
void multiply_block_weights(Codes codes, const std::vector<Product> &products);

// The part of a product that a thread computes at a time: some tiles of one output, for some panels of rows.
struct WorkItem {
  const Output *out;
  int64_t first_tile, last_tile, first_panel, last_panel;
};

// Returns work item number `chunk` of a job. A job is a product whose rows are in `num_panels` panels. An item has
// `panels_of_chunk` panels and `tiles_of_chunk` tiles.
template <class Job> WorkItem work_item(const Job &job, int64_t chunk) {
  const int64_t panel_chunks = divide_up(job.num_panels(), job.panels_of_chunk()), tiles_of_chunk = job.tiles_of_chunk();
  const Output *out = job.product.outputs;
  int64_t tiles = chunk / panel_chunks;
  for (; tiles >= out->num_chunks(tiles_of_chunk); ++out) tiles -= out->num_chunks(tiles_of_chunk);
  const int64_t tile = tiles * tiles_of_chunk, panel = chunk % panel_chunks * job.panels_of_chunk();
  return {out, tile, std::min(tile + tiles_of_chunk, out->num_tiles()), panel, std::min(panel + job.panels_of_chunk(), job.num_panels())};
}

// Notes in a recording that a call reads a job's weights. Formats whose jobs have no tile_bytes are not noted.
template <class Job> void note_reads(const Job &job) {
  if constexpr (requires { job.tile_bytes(); })
    for (const Output &out : job.product.outputs)
      for (const Weight &weight : {out.weight, out.up}) {
        const int64_t num_bytes = out.num_tiles() * job.tile_bytes() * (weight.is_compressed ? 3 : 4) / 4;
        if (weight.memory && num_bytes) recording->reads.push_back({reinterpret_cast<const char *>(weight.memory), num_bytes});
      }
}

// Assigns memory to all jobs and calls fill(job, number) for all their fills; then calls multiply(job, item) for
// every work item.
template <class Job, class Fill, class Multiply> void run(std::vector<Job> &jobs, Fill &&fill, Multiply &&multiply) {
  thread_local std::vector<char> buffer;
  thread_local std::vector<int64_t> fills, chunks;
  fills.assign(1, 0), chunks.assign(1, 0);
  int64_t bytes = 0;
  for (const Job &job : jobs) {
    bytes += job.panel_bytes();
    fills.push_back(fills.back() + job.num_fills());
    chunks.push_back(chunks.back() + job.product.num_chunks(job.tiles_of_chunk()) * divide_up(job.num_panels(), job.panels_of_chunk()));
  }
  if (recording && jobs.size() == 1) note_reads(jobs[0]);  // several jobs are experts, which differ in the next step
  if (buffer.size() < static_cast<size_t>(bytes)) buffer.resize(bytes);
  char *memory = buffer.data();
  for (Job &job : jobs) {
    job.assign_memory(memory);
    memory += job.panel_bytes();
  }
  parallel_for_each(fills, [&](int64_t job, int64_t number) { fill(jobs[job], number); });
  parallel_for_each(chunks, [&](int64_t job, int64_t chunk) { multiply(jobs[job], work_item(jobs[job], chunk)); });
}

// Writes result [num_rows, width], or silu(result) * up if `up` is not null: `count` outputs per row, from tile number
// `tile` on.
inline void write_rows(const Output &out, Dtype dtype, int64_t first_row, int64_t num_rows, int64_t tile, int64_t count, int64_t width, float *result,
                       float *up) {
  if (up) {  // both are rounded first, as if they had been written
    round_to(dtype, result, num_rows * width);
    round_to(dtype, up, num_rows * width);
    swiglu(dtype, result, up, num_rows * width);
  }
  for (int64_t row = 0; row < num_rows; ++row)
    write_floats(out.memory, dtype, (first_row + row) * out.num_outputs + tile * LANES, count, result + row * width);
}

// Writes the products of ROWS rows from `first_row` on and tiles first to last - 1, or silu(gate) * up of two products.
// compute(weight, tile, num_tiles, count, result) computes result [ROWS, num_tiles, 16]; `count` numbers of a row are
// outputs.
template <int ROWS, int TILES, class Compute>
void write_tiles(const Output &out, Dtype dtype, int64_t first_row, int64_t first, int64_t last, Compute &&compute) {
  alignas(64) float result[ROWS * TILES * LANES], up[ROWS * TILES * LANES];
  for (int64_t tile = first; tile < last;) {
    const int64_t num_tiles = tile + TILES <= last ? TILES : 1, width = num_tiles * LANES;
    const int64_t count = std::min(width, out.num_outputs - tile * LANES);
    compute(out.weight, tile, num_tiles, count, result);
    if (out.up.memory) compute(out.up, tile, num_tiles, count, up);
    write_rows(out, dtype, first_row, ROWS, tile, count, width, result, out.up.memory ? up : nullptr);
    tile += num_tiles;
  }
}

// Adds the weight's bias to result [num_rows, num_tiles, 16]: `count` numbers per row, from tile number `tile` on.
inline void add_bias(const Weight &weight, Dtype dtype, int64_t num_rows, int64_t tile, int64_t num_tiles, int64_t count, float *result) {
  float bias[MAX_TILES_OF_CHUNK * LANES];
  read_floats(weight.bias, dtype, tile * LANES, count, bias);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t i = 0; i < count; ++i) result[row * num_tiles * LANES + i] += bias[i];
}
