// Selects rows of a packed weight [N, K], as the lookup of a tied embedding does. `dequantize` in reference.py and in
// block_weight.py defines the values.
#include <limits>
#include <vector>

#include "../operator.h"
#include "block_weight.h"
#include "compressed.h"
#include "float8.h"
#include "products.h"

namespace {

constexpr int64_t CHUNK_NUMBERS = 1 << 13;  // numbers that justify another thread

struct PackedMatrix {
  const uint8_t *memory;
  bool is_compressed;
  Format format;
  int64_t num_outputs, num_inputs;
  Dtype dtype;  // of the result, and of a floating-point weight

  int64_t num_tiles() const { return divide_up(num_outputs, LANES); }
};

template <class Word> void copy_steps(const uint8_t *tile, int64_t lane, int64_t num_inputs, void *out) {
  constexpr int64_t PER_STEP = sizeof(Word);  // bytes of one output in a step
  const int64_t bytes = num_inputs * (sizeof(Word) == 4 ? 2 : sizeof(Word));
  for (int64_t at = 0, step = 0; at < bytes; at += PER_STEP, ++step)
    std::memcpy(static_cast<char *>(out) + at, tile + (step * LANES + lane) * PER_STEP, std::min(PER_STEP, bytes - at));
}

void take_floats(const PackedMatrix &matrix, int64_t row, void *out) {
  const int64_t tile = row / LANES, lane = row % LANES, inputs = matrix.num_inputs;
  if (matrix.dtype == Dtype::float32) {
    const auto *numbers = reinterpret_cast<const float *>(matrix.memory) + tile * inputs * LANES + lane;
    for (int64_t i = 0; i < inputs; ++i) static_cast<float *>(out)[i] = numbers[i * LANES];
  } else if (matrix.dtype == Dtype::float16) {
    copy_steps<uint16_t>(matrix.memory + tile * inputs * LANES * 2, lane, inputs, out);
  } else {
    const int64_t num_steps = divide_up(inputs, 2);
    if (!matrix.is_compressed) return copy_steps<uint32_t>(matrix.memory + tile * num_steps * NUMBERS_OF_STEP * 2, lane, inputs, out);
    thread_local std::vector<uint8_t> numbers;
    numbers.resize(num_steps * NUMBERS_OF_STEP * 2);
    decompress_tile(matrix.memory, {matrix.num_tiles(), num_steps}, tile, numbers.data());
    copy_steps<uint32_t>(numbers.data(), lane, inputs, out);
  }
}

void dequantize_integers(const PackedMatrix &matrix, int64_t row, float *out) {
  const Layout layout{matrix.format, matrix.num_inputs};
  const Weight weight{matrix.memory, false, nullptr};
  const int64_t tile = row / LANES, lane = row % LANES, first = tile * layout.num_groups() * LANES + lane;
  const uint8_t *codes = matrix.memory + tile * layout.tile_bytes() + lane * STEP;
  const float *scales = layout.scales(weight, matrix.num_tiles()) + first;
  const int8_t *zeros = layout.zeros(weight, matrix.num_tiles()) + first;
  for (int64_t i = 0; i < matrix.num_inputs; ++i) {
    const int64_t group = i / layout.group_size * LANES;
    const int byte = codes[i * layout.bits() / 8 / STEP * VECTOR_BYTES + i % STEP], shift = i / STEP % 2 * 4;
    const int code = layout.bits() == 8 ? byte : byte >> shift & 15;
    out[i] = static_cast<float>(code - (layout.has_zeros ? zeros[group] : layout.offset())) * scales[group];
  }
}

void dequantize_float8(const PackedMatrix &matrix, int64_t row, float *out) {
  const int64_t tile = row / LANES, lane = row % LANES, size = matrix.format.group_size, groups = matrix.num_inputs / size;
  const int64_t group_vectors = divide_up(size, 4), tile_bytes = groups * group_vectors * VECTOR_BYTES;
  const uint8_t *codes = matrix.memory + tile * tile_bytes + lane / 4 * 16 + lane % 4 * 2, *scales = matrix.memory + matrix.num_tiles() * tile_bytes;
  for (int64_t group = 0; group < groups; ++group, codes += group_vectors * VECTOR_BYTES) {
    float scale;
    std::memcpy(&scale, scales + ((tile * groups + group) * LANES + lane) * 4, 4);
    for (int64_t i = 0; i < size; ++i)
      *out++ = from_bfloat16(BFLOAT16_OF_FLOAT8[codes[i / 4 * VECTOR_BYTES + i / 2 % 2 * 8 + i % 2]]) * scale;
  }
}

template <class Kind> void dequantize_blocks(const PackedMatrix &matrix, int64_t row, float *out) {
  const int64_t tile = row / LANES, lane = row % LANES;
  const uint8_t *block = matrix.memory + tile * (matrix.num_inputs / Kind::block) * Kind::block_bytes;
  const double global_scale = global_scale_of<Kind>(matrix.memory, matrix.num_tiles(), matrix.num_inputs);
  alignas(64) uint8_t codes[Kind::block * LANES + (Kind::block / Kind::group) * LANES * 4 * 2];
  const auto *scales = reinterpret_cast<const float *>(codes + Kind::block * LANES), *minimums = scales + Kind::block / Kind::group * LANES;
  for (int64_t first = 0; first < matrix.num_inputs; first += Kind::block, block += Kind::block_bytes) {
    expand_tiles<Kind>(block, 1, Kind::block, codes);
    for (int64_t i = 0; i < Kind::block; ++i) {
      const int code = codes[i / STEP * VECTOR_BYTES + lane * STEP + i % STEP];
      const int64_t group = i / Kind::group * LANES + lane;
      if constexpr (Kind::has_minimums)
        *out++ = scales[group] * static_cast<float>(code) - minimums[group];
      else
        *out++ = static_cast<float>(scales[group] * global_scale) * static_cast<float>(code - Kind::offset);
    }
  }
}

void dequantize(const PackedMatrix &matrix, int64_t row, float *out) {
  if (matrix.format.codes == Codes::float8)
    dequantize_float8(matrix, row, out);
  else if (matrix.format.codes >= Codes::q4_1)
    with_kind(matrix.format.codes, [&](auto kind) { dequantize_blocks<decltype(kind)>(matrix, row, out); });
  else
    dequantize_integers(matrix, row, out);
}

void take_row(const PackedMatrix &matrix, int64_t row, int64_t index, void *out) {
  const int64_t inputs = matrix.num_inputs, row_bytes = inputs * (matrix.dtype == Dtype::float32 ? 4 : 2);
  const bool is_inside = row >= 0 && row < matrix.num_outputs;
  if (is_inside && matrix.format.codes == Codes::none) return take_floats(matrix, row, static_cast<char *>(out) + index * row_bytes);
  thread_local std::vector<float> numbers;
  numbers.assign(inputs, std::numeric_limits<float>::quiet_NaN());
  if (is_inside) dequantize(matrix, row, numbers.data());
  write_floats(out, matrix.dtype, index * inputs, inputs, numbers.data());
}

}  // namespace

// out [num_rows, K] of the dtype: rows `numbers` of the weight. A number outside the weight gives a row of NaN.
OPERATOR(take_rows, (const uint8_t *memory, bool is_compressed, int64_t group_size, Codes codes, bool has_zeros, int64_t num_outputs,
                     int64_t num_inputs, const int64_t *numbers, int64_t num_rows, Dtype dtype, void *out)) {
  const PackedMatrix matrix{memory, is_compressed, {group_size, codes, has_zeros}, num_outputs, num_inputs, dtype};
  const int64_t size = rows_of_chunk(CHUNK_NUMBERS, num_inputs);
  parallel_for(divide_up(num_rows, size), [&](int64_t chunk) {
    for (int64_t i = chunk * size; i < std::min((chunk + 1) * size, num_rows); ++i) take_row(matrix, numbers[i], i, out);
  });
}
