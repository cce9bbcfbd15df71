// x [M, K] times W [N, K] transposed, plus bias [N]. kernels/linear/reference.py is the specification.
// One call multiplies up to three weights, with a result for each. The rows are prepared once, and threads synchronise
// once. Or it multiplies two weights, gate and up, with the result silu(gate) * up. float_weight.cpp multiplies
// floating-point weights, int_weight.cpp integer weights, float8_weight.cpp float8 weights, block_weight.cpp ggml's blocks.
#include <vector>

#include "../operator.h"
#include "compressed.h"
#include "products.h"

namespace {

std::vector<Product> &cleared_products() {
  thread_local std::vector<Product> products;
  products.clear();
  return products;
}

void multiply(const Format &format, const std::vector<Product> &products) {
  if (format.codes == Codes::float8)
    multiply_float8_weights(format.group_size, products);
  else if (format.codes >= Codes::q4_1)
    multiply_block_weights(format.codes, products);
  else if (format.codes != Codes::none)
    multiply_int_weights(format, products);
  else
    multiply_float_weights(products);
}

void multiply(const Format &format, const Product &product) {
  auto &products = cleared_products();
  products.push_back(product);
  multiply(format, products);
}

}  // namespace

// w0 to w2: weights, whether each is compressed, their biases, results and numbers of outputs. A missing weight has 0
// outputs.
OPERATOR(matmul, (const void *x, const float *scales, int64_t scale_stride, Dtype dtype, int64_t num_rows, int64_t num_inputs,
                  int64_t group_size, Codes codes, bool has_zeros, const uint8_t *w0, bool compressed0, const void *bias0, void *out0,
                  int64_t n0, const uint8_t *w1, bool compressed1, const void *bias1, void *out1, int64_t n1, const uint8_t *w2,
                  bool compressed2, const void *bias2, void *out2, int64_t n2)) {
  multiply({group_size, codes, has_zeros},
           {{x, scales, scale_stride, dtype, num_rows, num_inputs},
            {{{w0, compressed0, bias0}, {}, out0, n0}, {{w1, compressed1, bias1}, {}, out1, n1}, {{w2, compressed2, bias2}, {}, out2, n2}}});
}

OPERATOR(matmul_swiglu, (const void *x, const float *scales, int64_t scale_stride, Dtype dtype, int64_t num_rows, int64_t num_inputs,
                         int64_t group_size, Codes codes, bool has_zeros, const uint8_t *gate, bool gate_compressed, const void *gate_bias,
                         const uint8_t *up, bool up_compressed, const void *up_bias, void *out, int64_t num_outputs)) {
  multiply({group_size, codes, has_zeros}, {{x, scales, scale_stride, dtype, num_rows, num_inputs},
                                           {{{gate, gate_compressed, gate_bias}, {up, up_compressed, up_bias}, out, num_outputs}}});
}

// Multiplies rows starts[i] to starts[i + 1] - 1 by weights[i]. If ups is not null, the result is silu of this product
// times the product with ups[i]. If biases [weights, outputs] of x's dtype is not null, it is added. A weight without
// rows is not read.
OPERATOR(grouped_matmul, (const void *x, const float *scales, int64_t scale_stride, Dtype dtype, int64_t num_inputs, int64_t group_size,
                          Codes codes, bool has_zeros, const uint8_t *const *weights, const bool *compressed, const uint8_t *const *ups,
                          const bool *ups_compressed, const void *biases, const int64_t *starts, void *out, int64_t num_weights,
                          int64_t num_outputs)) {
  const Rows rows{x, scales, scale_stride, dtype, starts[num_weights], num_inputs};
  auto &products = cleared_products();
  for (int64_t i = 0; i < num_weights; ++i) {
    const int64_t num_rows = starts[i + 1] - starts[i];
    void *to = static_cast<char *>(out) + starts[i] * num_outputs * rows.out_bytes();
    Weight up{};
    if (ups) up = {ups[i], ups_compressed[i], nullptr};
    const void *bias = biases ? static_cast<const char *>(biases) + i * num_outputs * rows.out_bytes() : nullptr;
    if (num_rows) products.push_back({rows.part(starts[i], num_rows), {{{weights[i], compressed[i], bias}, up, to, num_outputs}}});
  }
  multiply({group_size, codes, has_zeros}, products);
}

// For every head: x [heads, rows, inputs] times its packed weight transposed: out [heads, rows, outputs].
OPERATOR(matmul_per_head, (const void *x, Dtype dtype, int64_t num_heads, int64_t num_rows, int64_t num_inputs, const uint8_t *const *weights,
                           const bool *compressed, void *out, int64_t num_outputs)) {
  const Rows rows{x, nullptr, 0, dtype, num_heads * num_rows, num_inputs};
  auto &products = cleared_products();
  for (int64_t head = 0; head < num_heads; ++head) {
    void *to = static_cast<char *>(out) + head * num_rows * num_outputs * rows.out_bytes();
    products.push_back({rows.part(head * num_rows, num_rows), {{{weights[head], compressed[head], nullptr}, {}, to, num_outputs}}});
  }
  multiply_float_weights(products);
}

// For every head: x [heads, rows, inputs] times its weight transposed, plus bias: out [heads, rows, outputs]. Strides
// of the weight are in numbers; the stride of outputs or the stride of inputs is 1.
OPERATOR(linear, (const void *x, Dtype dtype, int64_t num_heads, int64_t num_rows, int64_t num_inputs, const void *weight,
                  int64_t head_stride, int64_t output_stride, int64_t input_stride, const void *bias, void *out, int64_t num_outputs)) {
  const Rows rows{x, nullptr, 0, dtype, num_heads * num_rows, num_inputs};
  auto &products = cleared_products();
  for (int64_t head = 0; head < num_heads; ++head) {
    void *to = static_cast<char *>(out) + head * num_rows * num_outputs * rows.out_bytes();
    const Plain plain{static_cast<const char *>(weight) + head * head_stride * rows.out_bytes(), output_stride, input_stride};
    products.push_back({rows.part(head * num_rows, num_rows), {{{nullptr, false, bias}, {}, to, num_outputs}}, plain});
  }
  multiply_float_weights(products);
}

// Counts how many of `count` numbers have each upper byte: counts [256].
OPERATOR(count_upper_bytes, (const uint16_t *numbers, int64_t count, int64_t *counts)) {
  constexpr int64_t NUMBERS_OF_CHUNK = 1 << 18;
  std::vector<int64_t> chunk_counts(divide_up(count, NUMBERS_OF_CHUNK) * 256);
  parallel_for(divide_up(count, NUMBERS_OF_CHUNK), [&](int64_t chunk) {
    for (int64_t i = chunk * NUMBERS_OF_CHUNK; i < std::min((chunk + 1) * NUMBERS_OF_CHUNK, count); ++i)
      ++chunk_counts[chunk * 256 + (numbers[i] >> 8)];
  });
  std::fill(counts, counts + 256, 0);
  for (size_t i = 0; i < chunk_counts.size(); ++i) counts[i % 256] += chunk_counts[i];
}

// Compresses tiles of bfloat16 [tiles, steps, 16, 2] to 12 bits. `memory` already holds the upper bytes and has
// space for all exceptions.
OPERATOR(compress, (const uint16_t *tiles, int64_t num_tiles, int64_t num_steps, uint8_t *memory)) {
  const Compressed layout{num_tiles, num_steps};
  std::vector<std::vector<Exception>> exceptions(num_tiles);
  parallel_for(num_tiles, [&](int64_t tile) {
    exceptions[tile] = compress_tile(layout, memory, tiles + tile * num_steps * NUMBERS_OF_STEP, memory + layout.groups(tile));
  });
  uint32_t count = 0;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    std::memcpy(memory + layout.start(tile), &count, sizeof count);
    std::memcpy(memory + layout.exception(count), exceptions[tile].data(), exceptions[tile].size() * sizeof(Exception));
    count += exceptions[tile].size();
  }
}

OPERATOR(decompress, (const uint8_t *memory, int64_t num_tiles, int64_t num_steps, uint8_t *tiles)) {
  const Compressed layout{num_tiles, num_steps};
  parallel_for(num_tiles, [&](int64_t tile) { decompress_tile(memory, layout, tile, tiles + tile * num_steps * NUMBERS_OF_STEP * 2); });
}
