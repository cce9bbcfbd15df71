// The inner loop of GPTQ. kernels/round_channels/reference.py is the specification. A chunk of output channels is
// independent of all other chunks, and each element is one sequence of operations without fused multiply-add, so the
// bits equal the reference's.
#include <algorithm>
#include <vector>

#include "../aligned_buffer.h"
#include "../elements.h"
#include "../operator.h"
#include "../linear/float8.h"
#include "../quantize_rows/quantize.h"
#include "../threads.h"

namespace {

constexpr int VECTORS = 4;  // independent sums, because a subtraction takes three cycles
constexpr int64_t WIDTH = VECTORS * LANES;
constexpr float SATURATED = 1024.0f;  // no code is larger

struct Block {
  float *weights;       // [C, O]
  const float *factor;  // [C, C], transposed: row i has the factors of all errors in channel i
  const float *scales;  // [R, O]
  const int8_t *zero_points;
  const bool *kept;
  uint8_t *codes;  // [R, O]
  float *errors;   // [R, O]
  bool is_float8;
  Floats lowest, highest;
  int64_t num_channels, num_outputs, num_rounded;
};

// Loads bytes `first` to `first` + 15 of a row of `count` as integers; 0 after its end.
Ints load_part(const void *row, int64_t first, int64_t count) {
  alignas(16) int8_t part[LANES] = {};
  std::memcpy(part, static_cast<const int8_t *>(row) + first, std::clamp<int64_t>(count - first, 0, LANES));
  return load_bytes(part);
}

Floats from_float8(Ints codes) {
  alignas(16) int8_t bytes[LANES];
  store_bytes(bytes, codes);
  float numbers[LANES];
  for (int64_t i = 0; i < LANES; ++i) numbers[i] = from_bfloat16(BFLOAT16_OF_FLOAT8[static_cast<uint8_t>(bytes[i])]);
  return load(numbers);
}

Floats bounded(Floats x, Floats lowest, Floats highest) { return smaller(larger(x, lowest), highest); }

// Writes the codes of 16 weights of channel i, and returns the codes' values.
Floats round_weights(const Block &block, int64_t i, int64_t output, Floats weight, Floats scale) {
  const int64_t at = i * block.num_outputs, count = block.num_outputs;
  if (block.kept) weight = as_floats(bit_and(as_ints(weight), subtract(splat(0), load_part(block.kept + at, output, count))));
  const Floats ratio = divide(weight, scale);
  Ints codes;
  Floats value;
  if (block.is_float8) {
    codes = to_float8(bounded(ratio, block.lowest, block.highest));
    value = from_float8(codes);
  } else {
    const Floats zeros = block.zero_points ? to_floats(load_part(block.zero_points + at, output, count)) : splat(0.0f);
    const Floats nearest = to_floats(round_to_ints(bounded(ratio, splat(-SATURATED), splat(SATURATED))));
    const Floats code = bounded(add(nearest, zeros), block.lowest, block.highest);
    codes = round_to_ints(code);
    value = subtract(code, zeros);
  }
  alignas(16) int8_t bytes[LANES];
  store_bytes(bytes, codes);
  std::memcpy(block.codes + at + output, bytes, std::clamp<int64_t>(count - output, 0, LANES));
  return multiply(value, scale);
}

// Loads vector v of outputs; 0 after the end of the row.
Floats load_outputs(const Block &block, const float *rows, int64_t i, int64_t output) {
  return load_elements<Dtype::float32>(rows + i * block.num_outputs, output, block.num_outputs);
}

// Rounds the channels of outputs `first` to `first` + WIDTH - 1.
void round_outputs(const Block &block, int64_t first, float *errors) {
  for (int64_t i = 0; i < block.num_channels; ++i) {
    const float *factor = block.factor + i * block.num_channels;
    Floats weights[VECTORS];
    UNROLL
    for (int v = 0; v < VECTORS; ++v) weights[v] = load_outputs(block, block.weights, i, first + v * LANES);
    for (int64_t j = 0; j < std::min(i, block.num_rounded); ++j) {  // in the order in which the errors arise
      const Floats f = splat(factor[j]);
      UNROLL
      for (int v = 0; v < VECTORS; ++v) weights[v] = subtract(weights[v], multiply(f, load(errors + j * WIDTH + v * LANES)));
    }
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t output = first + v * LANES;
      store_elements<Dtype::float32>(block.weights + i * block.num_outputs, output, block.num_outputs, weights[v]);
      if (i >= block.num_rounded || output >= block.num_outputs) continue;
      const Floats scale = load_outputs(block, block.scales, i, output), rounded = round_weights(block, i, output, weights[v], scale);
      const Floats error = divide(subtract(weights[v], rounded), splat(factor[i]));
      store(errors + i * WIDTH + v * LANES, error);
      store_elements<Dtype::float32>(block.errors + i * block.num_outputs, output, block.num_outputs, error);
    }
  }
}

}  // namespace

// weights [C, O], factor [C, C] transposed; scales, zero_points, kept, codes and errors [R, O]. zero_points and kept may
// be null.
OPERATOR(round_channels, (float *weights, const float *factor, const float *scales, const int8_t *zero_points, const bool *kept, uint8_t *codes,
                          float *errors, bool is_float8, float lowest, float highest, int64_t num_channels, int64_t num_outputs,
                          int64_t num_rounded)) {
  const Block block{weights, factor,        scales,         zero_points,  kept,        codes,      errors,
                    is_float8, splat(lowest), splat(highest), num_channels, num_outputs, num_rounded};
  parallel_for(divide_up(num_outputs, WIDTH), [&](int64_t chunk) {
    thread_local std::vector<float> memory;
    round_outputs(block, chunk * WIDTH, aligned_buffer(memory, block.num_rounded * WIDTH));
  });
}
