// Mamba-2's state space layer by its recurrence. kernels/ssd/reference.py is the specification.
#include "../operator.h"
#include "../state_panels/panels.h"

namespace {

struct Call {
  const void *xbc, *dt;
  const float *dt_bias, *decay_log, *skip;
  void *out;
  int64_t num_groups, group;
  float min_step, max_step;
  States states;
};

template <Dtype DTYPE> class Ssd {
public:
  Ssd(const Call &call, const Panel &panel) : call(call), panel(panel) {}

  void prepare(int64_t first, int64_t count) {
    const Floats dt = add(load_gates<DTYPE>(panel, call.dt, first, count), splat(call.dt_bias[panel.head]));
    const Floats bounded = smaller(splat(call.max_step), larger(splat(call.min_step), softplus(dt)));  // NaN stays NaN
    const Floats rate = exp(splat(call.decay_log[panel.head]));
    store(steps, bounded);
    store(decays, exp(subtract(splat(0.0f), multiply(rate, bounded))));
  }

  void step(int64_t t, int64_t i, const float *from, float *to) const {
    alignas(64) float keys[MAX_ROWS], queries[MAX_ROWS];  // B and C of the paper
    const int64_t channels = call.states.num_columns, size = call.states.num_heads * channels, groups = call.num_groups * num_states();
    const int64_t token = t * (size + 2 * groups), key = token + size + panel.head / call.group * num_states();
    widen(key, keys);
    widen(key + groups, queries);
    const void *row = address<DTYPE>(call.xbc, token + panel.head * channels);
    Floats x[VECTORS], deltas[VECTORS], outputs[VECTORS];
    for (int64_t v = 0; v < VECTORS; ++v) {
      x[v] = load_elements<DTYPE>(row, panel.column(v), channels);
      deltas[v] = multiply(splat(steps[i]), x[v]);
    }
    const auto decay_of = [decay = splat(decays[i])](int64_t) { return decay; };
    update_panel(from, to, num_states(), decay_of, keys, deltas, queries, outputs);
    for (int64_t v = 0; v < VECTORS; ++v) outputs[v] = multiply_add(splat(call.skip[panel.head]), x[v], outputs[v]);
    store_output<DTYPE>(panel, call.out, t, outputs);
  }

private:
  int64_t num_states() const { return call.states.num_rows; }

  void widen(int64_t place, float *to) const {
    const void *from = address<DTYPE>(call.xbc, place);
    for (int64_t i = 0; i < num_states(); i += LANES) store(to + i, load_elements<DTYPE>(from, i, num_states()));
  }

  const Call &call;
  const Panel &panel;
  alignas(64) float steps[TOKENS], decays[TOKENS];
};

}  // namespace

// xbc, dt and out of one dtype; states [slots, heads, panels, state channels, COLUMNS]. Rows of `out` after the last
// sequence are not written.
OPERATOR(ssd, (const void *xbc, const void *dt, const float *dt_bias, const float *decay_log, const float *skip, float *states,
               const int64_t *query_starts, const int64_t *reads, const int64_t *writes, const int64_t *ends, void *out, Dtype dtype,
               int64_t num_sequences, int64_t num_heads, int64_t num_groups, int64_t state_channels, int64_t head_channels,
               int64_t group, float min_step, float max_step)) {
  const States slots{states, query_starts, reads, writes, ends, num_sequences, num_heads, state_channels, head_channels};
  advance_all<Ssd>(dtype, Call{xbc, dt, dt_bias, decay_log, skip, out, num_groups, group, min_step, max_step, slots});
}
