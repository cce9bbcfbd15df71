// A pool of threads that share the work of one call. Results do not depend on which thread computes a chunk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

// Calls work(context, chunk) once for each chunk from 0 to num_chunks - 1, on the calling thread and the pool's
// threads. Returns when all chunks are done. Several threads may call it; their calls run one after the other. Must not
// be called from within work.
void run_chunks(int64_t num_chunks, void (*work)(void *, int64_t), void *context);

template <class Work> void parallel_for(int64_t num_chunks, Work &&work) {
  using Body = std::remove_reference_t<Work>;
  run_chunks(num_chunks, [](void *body, int64_t chunk) { (*static_cast<Body *>(body))(chunk); }, &work);
}

// Like parallel_for, for several jobs in one call: work(job, chunk). starts[job] is the number of chunks of all earlier
// jobs; the last element of starts is the number of all chunks.
template <class Work> void parallel_for_each(const std::vector<int64_t> &starts, Work &&work) {
  parallel_for(starts.back(), [&](int64_t chunk) {
    const int64_t job = std::upper_bound(starts.begin(), starts.end(), chunk) - starts.begin() - 1;
    work(job, chunk - starts[job]);
  });
}

// Returns the number of rows per chunk, at least 1. `chunk_channels`: the channels that justify another thread.
inline int64_t rows_of_chunk(int64_t chunk_channels, int64_t channels) {
  return std::max<int64_t>(chunk_channels / std::max<int64_t>(channels, 1), 1);
}

// Memory that a later call reads.
struct MemoryRange {
  const char *begin;
  int64_t num_bytes;
};

// The ranges that the next calls of run_chunks read, in order; at most MAX_EXPECTED count. Until the next call, each
// waiting thread fetches its part of them into its cache. The memory may be freed meanwhile: a fetch raises no fault.
constexpr int64_t MAX_EXPECTED = 2;
void expect_reads(const MemoryRange *ranges, int64_t num_ranges);

// The number of threads that share the work of a call, including the calling thread. Initially one per physical core
// that the process may use.
void set_threads(int32_t num_threads);
int32_t get_threads();
