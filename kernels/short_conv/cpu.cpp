// The causal convolution of recurrent layers. kernels/short_conv/reference.py is the specification.
#include <algorithm>

#include "../elements.h"
#include "../exp.h"
#include "../operator.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 12;  // channels of tokens that justify another thread
constexpr int64_t PANEL = 256;               // channels that a thread carries through a sequence

struct Call {
  const void *projected, *weight, *bias;
  void *states;
  const int64_t *query_starts, *reads, *writes, *ends;
  void *out;
  int64_t num_taps, channels;
};

// Computes 16 channels, from channel `i`, of all new tokens of a sequence. Additions run in the order of the taps.
template <Dtype DTYPE, bool IS_GATED> void convolve(const Call &call, int64_t sequence, int64_t i) {
  const int64_t channels = call.channels, num_before = call.num_taps - 1;
  const int64_t start = call.query_starts[sequence], length = call.query_starts[sequence + 1] - start;
  const int64_t read = call.reads[sequence], write = call.writes[sequence];
  const auto row = [&](const void *rows, int64_t number) { return static_cast<const char *>(rows) + number * channels * ELEMENT_BYTES<DTYPE>; };
  const auto part = [&](int64_t t, int64_t number) { return load_elements<DTYPE>(row(call.projected, (start + t) * (IS_GATED ? 3 : 1) + number), i, channels); };
  const auto state = [&](int64_t slot, int64_t k) { return const_cast<char *>(row(call.states, slot * num_before + k)); };
  // The input of token t of the sequence; a negative t is a token before this step.
  const auto token = [&](int64_t t) {
    if (t >= 0) return IS_GATED ? rounded<DTYPE>(multiply(part(t, 0), part(t, 2))) : part(t, 0);
    return read < 0 ? splat(0.0f) : load_elements<DTYPE>(state(read, num_before + t), i, channels);
  };
  const Floats bias = call.bias ? load_elements<DTYPE>(call.bias, i, channels) : splat(0.0f);
  for (int64_t t = 0; t < length; ++t) {
    Floats sum = bias;
    for (int64_t j = 0; j <= num_before; ++j) sum = multiply_add(load_elements<DTYPE>(row(call.weight, j), i, channels), token(t - num_before + j), sum);
    const Floats y = IS_GATED ? multiply(part(t, 1), rounded<DTYPE>(sum)) : divide(sum, add(splat(1.0f), exp(subtract(splat(0.0f), sum))));
    store_elements<DTYPE>(const_cast<char *>(row(call.out, start + t)), i, channels, rounded<DTYPE>(y));
  }
  if (write < 0) return;
  const int64_t kept = call.ends[sequence] - start;
  // Oldest first: a sequence that writes the slot that it reads moves each token to a lower place.
  for (int64_t k = 0; k < num_before; ++k) store_elements<DTYPE>(state(write, k), i, channels, token(kept - num_before + k));
}

}  // namespace

// projected [tokens, 3, channels] if it is gated, else [tokens, channels]; weight [taps, channels], bias [channels] or
// null, states [slots, taps - 1, channels] and out [tokens, channels] of one dtype. Rows of `out` after the last sequence
// are not written.
OPERATOR(short_conv, (const void *projected, const void *weight, const void *bias, void *states, const int64_t *query_starts,
                      const int64_t *reads, const int64_t *writes, const int64_t *ends, void *out, Dtype dtype,
                      bool is_gated, int64_t num_sequences, int64_t num_taps, int64_t channels)) {
  const Call call{projected, weight, bias, states, query_starts, reads, writes, ends, out, num_taps, channels};
  const int64_t num_panels = divide_up(channels, PANEL), count = num_sequences * num_panels;
  const int64_t tokens = divide_up(query_starts[num_sequences], std::max<int64_t>(num_sequences, 1));  // mean of a sequence
  const int64_t size = rows_of_chunk(CHUNK_CHANNELS, tokens * PANEL);
  parallel_for(divide_up(count, size), [&](int64_t chunk) {
    for (int64_t panel = chunk * size; panel < std::min((chunk + 1) * size, count); ++panel) {
      const int64_t sequence = panel / num_panels, first = panel % num_panels * PANEL;
      if (query_starts[sequence] == query_starts[sequence + 1]) continue;
      for_dtype(dtype, [&]<Dtype DTYPE>() {
        const auto compute = is_gated ? convolve<DTYPE, true> : convolve<DTYPE, false>;
        for (int64_t i = first; i < std::min(first + PANEL, channels); i += LANES) compute(call, sequence, i);
      });
    }
  });
}
