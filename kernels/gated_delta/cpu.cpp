// The gated delta rule of recurrent layers. kernels/gated_delta/reference.py is the specification.
#include <cmath>

#include "../operator.h"
#include "../state_panels/panels.h"

namespace {

struct Call {
  const void *qkv, *decay, *write_gate;
  const float *decay_log, *decay_bias;
  void *out;
  int64_t num_key_heads, group, num_decays;  // num_decays: of a head, 1 or one for each key channel
  States states;
};

template <Dtype DTYPE> class GatedDelta {
public:
  GatedDelta(const Call &call, const Panel &panel) : call(call), panel(panel), rate(exp(splat(call.decay_log[panel.head]))) {}

  void prepare(int64_t first, int64_t count) {
    const Floats write_gate = load_gates<DTYPE>(panel, call.write_gate, first, count);
    store(write_gates, divide(splat(1.0f), add(splat(1.0f), exp(subtract(splat(0.0f), write_gate)))));
    if (call.num_decays > 1) return;
    store(decays, decay_of(load_gates<DTYPE>(panel, call.decay, first, count), splat(call.decay_bias[panel.head])));
  }

  void step(int64_t t, int64_t i, const float *from, float *to) const {
    alignas(64) float keys[MAX_ROWS], queries[MAX_ROWS];
    const int64_t num_values = call.states.num_columns, key_size = call.num_key_heads * num_keys();
    const int64_t token = t * (2 * key_size + call.states.num_heads * num_values);
    const int64_t key = token + panel.head / call.group % call.num_key_heads * num_keys();
    normalise(key, queries);
    normalise(key + key_size, keys);
    const void *values = address<DTYPE>(call.qkv, token + 2 * key_size + panel.head * num_values);
    Floats known[VECTORS], deltas[VECTORS], outputs[VECTORS];  // known: M^T k after the decay
    const auto set_deltas = [&] {
      for (int64_t v = 0; v < VECTORS; ++v)
        deltas[v] = multiply(splat(write_gates[i]), subtract(load_elements<DTYPE>(values, panel.column(v), num_values), known[v]));
    };
    if (call.num_decays == 1) {
      const Floats decay = splat(decays[i]);
      multiply_panel(from, keys, known);
      for (Floats &product : known) product = multiply(decay, product);
      set_deltas();
      update_panel(from, to, num_keys(), [decay](int64_t) { return decay; }, keys, deltas, queries, outputs);
    } else {
      alignas(64) float of_rows[MAX_ROWS], decayed_keys[MAX_ROWS];
      decay_rows(t, keys, of_rows, decayed_keys);
      multiply_panel(from, decayed_keys, known);
      set_deltas();
      update_panel(from, to, num_keys(), [&of_rows](int64_t row) { return splat(of_rows[row]); }, keys, deltas, queries, outputs);
    }
    const Floats scale = splat(1.0f / std::sqrt(static_cast<float>(num_keys())));
    for (int64_t v = 0; v < VECTORS; ++v) outputs[v] = multiply(scale, outputs[v]);
    store_output<DTYPE>(panel, call.out, t, outputs);
  }

private:
  int64_t num_keys() const { return call.states.num_rows; }

  Floats decay_of(Floats decay, Floats bias) const {
    return exp(subtract(splat(0.0f), multiply(rate, softplus(add(decay, bias)))));
  }

  // Stores the decays of token t for the rows of M, and the keys times their decays.
  void decay_rows(int64_t t, const float *keys, float *of_rows, float *decayed_keys) const {
    const int64_t first = panel.head * num_keys();
    const void *row = address<DTYPE>(call.decay, t * call.states.num_heads * num_keys() + first);
    for (int64_t i = 0; i < num_keys(); i += LANES) {
      const Floats bias = load_elements<Dtype::float32>(call.decay_bias + first, i, num_keys());
      const Floats decay = decay_of(load_elements<DTYPE>(row, i, num_keys()), bias);
      store(of_rows + i, decay);
      store(decayed_keys + i, multiply(decay, load(keys + i)));
    }
  }

  void normalise(int64_t place, float *to) const {
    const void *from = address<DTYPE>(call.qkv, place);
    Floats squares = splat(0.0f);
    for (int64_t i = 0; i < num_keys(); i += LANES) {
      const Floats x = load_elements<DTYPE>(from, i, num_keys());
      squares = multiply_add(x, x, squares);
      store(to + i, x);
    }
    const Floats inverse = splat(1.0f / std::sqrt(sum(squares) + 1e-6f));
    for (int64_t i = 0; i < num_keys(); i += LANES) store(to + i, multiply(load(to + i), inverse));
  }

  // Returns M^T keys in `products`, where M is the panel `from`. The sums are as in update_panel.
  void multiply_panel(const float *from, const float *keys, Floats (&products)[VECTORS]) const {
    Floats even[VECTORS] = {splat(0.0f), splat(0.0f)}, odd[VECTORS] = {splat(0.0f), splat(0.0f)};
    const auto add_row = [&](int64_t row, int64_t v, Floats &sum) {
      sum = multiply_add(splat(keys[row]), load(from + row * COLUMNS + v * LANES), sum);
    };
    int64_t n = 0;
    for (; n + 1 < num_keys(); n += 2)
      UNROLL
      for (int64_t v = 0; v < VECTORS; ++v) add_row(n, v, even[v]), add_row(n + 1, v, odd[v]);
    for (int64_t v = 0; v < VECTORS; ++v) {
      if (n < num_keys()) add_row(n, v, even[v]);
      products[v] = add(even[v], odd[v]);
    }
  }

  const Call &call;
  const Panel &panel;
  const Floats rate;
  alignas(64) float decays[TOKENS], write_gates[TOKENS];
};

}  // namespace

// qkv, decay, write_gate and out of one dtype; states [slots, heads, panels, key channels, COLUMNS]; decay and decay_bias
// have num_decays numbers for each head: 1 or the key channels. Rows of `out` after the last sequence are not written.
OPERATOR(gated_delta, (const void *qkv, const void *decay, const void *write_gate, const float *decay_log, const float *decay_bias,
                       float *states, const int64_t *query_starts, const int64_t *reads, const int64_t *writes,
                       const int64_t *ends, void *out, Dtype dtype, int64_t num_sequences, int64_t num_heads, int64_t num_key_heads,
                       int64_t key_channels, int64_t value_channels, int64_t group, int64_t num_decays)) {
  const States slots{states, query_starts, reads, writes, ends, num_sequences, num_heads, key_channels, value_channels};
  advance_all<GatedDelta>(dtype, Call{qkv, decay, write_gate, decay_log, decay_bias, out, num_key_heads, group, num_decays, slots});
}
