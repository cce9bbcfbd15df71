// Collectives of ranks that are processes of one machine. Each rank copies its piece into shared memory, publishes it,
// waits for the other ranks, and copies their pieces. kernels/collectives/__init__.py (Threads) is the specification.
#include "../operator.h"
#include "../simd.h"
#include "../threads.h"

#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr auto SPIN = std::chrono::microseconds(200);  // as in threads.cpp: waking a sleeping process costs microseconds on both sides
// A waiting rank checks for an abort at this interval, because all ranks that could wake it may be lost.
constexpr timespec ABORT_CHECK_INTERVAL{0, 50'000'000};
constexpr int64_t SLOT = 1 << 22;       // bytes of a piece; each rank has two slots
constexpr int64_t HEADER = 1 << 16;
constexpr int32_t MAX_RANKS = 512;
constexpr int64_t CHUNK = 1 << 17;  // bytes that justify another thread

struct alignas(64) Rank {
  std::atomic<uint32_t> published;  // number of exchanges whose piece this rank has written
  std::atomic<uint32_t> sleepers;   // number of ranks that sleep until it publishes
};

// The header of the shared memory, initially zeros. The slots follow: of rank 0 for even exchanges, of rank 0 for odd
// exchanges, of rank 1, and so on.
struct Region {
  std::atomic<uint32_t> aborted;
  Rank ranks[MAX_RANKS];

  char *slot(int32_t rank, uint32_t number) { return reinterpret_cast<char *>(this) + HEADER + (2 * rank + number % 2) * SLOT; }
};
static_assert(sizeof(Region) <= HEADER && std::atomic<uint32_t>::is_always_lock_free);

// FUTEX_PRIVATE is not possible: the sleepers are other processes.
void wake(Rank &rank) {
  if (rank.sleepers.load() != 0) syscall(SYS_futex, &rank.published, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until a rank has published `number` exchanges. Returns false if the region is aborted.
bool wait_for(Region &region, Rank &rank, uint32_t number, bool spins) {
  const auto reached = [&] { return static_cast<int32_t>(rank.published.load(std::memory_order_acquire) - number) >= 0; };
  for (const auto end = std::chrono::steady_clock::now() + SPIN; spins && std::chrono::steady_clock::now() < end;)
    for (int i = 0; i < 32; ++i) {
      if (reached()) return !region.aborted.load(std::memory_order_relaxed);
      _mm_pause();
    }
  for (;;) {
    if (region.aborted.load()) return false;
    const uint32_t seen = rank.published.load();
    if (reached()) return true;
    rank.sleepers.fetch_add(1);
    syscall(SYS_futex, &rank.published, FUTEX_WAIT, seen, &ABORT_CHECK_INTERVAL, nullptr, 0);
    rank.sleepers.fetch_sub(1);
  }
}

// The participants of a call.
struct Ranks {
  Region &region;
  const int32_t this_rank, count;
  const bool spins;

  // Writes this rank's piece with `write(slot)` and publishes it. Then, if `reads`, calls `read(rank, slot)` for the
  // piece of each rank. Returns false if the region is aborted.
  template <class Write, class Read> bool exchange(bool reads, Write &&write, Read &&read) {
    Rank &writer = region.ranks[this_rank];
    const uint32_t number = writer.published.load(std::memory_order_relaxed);
    // This exchange overwrites the slot of exchange number - 2. A rank that has published exchange number - 1 has read
    // that slot.
    for (int32_t rank = 0; rank < count; ++rank)
      if (!wait_for(region, region.ranks[rank], number, spins)) return false;
    write(region.slot(this_rank, number));
    writer.published.store(number + 1);
    wake(writer);
    for (int32_t i = 0; reads && i < count; ++i) {
      const int32_t rank = (this_rank + i) % count;  // begins with the piece of this rank, which is already available
      if (!wait_for(region, region.ranks[rank], number + 1, spins)) return false;
      read(rank, region.slot(rank, number));
    }
    return true;
  }
};

// Calls work(row) for all rows. A row has `row_bytes` bytes.
template <class Work> void for_rows(int64_t num_rows, int64_t row_bytes, Work &&work) {
  const int64_t size = rows_of_chunk(CHUNK, row_bytes);
  parallel_for(divide_up(num_rows, size), [&](int64_t chunk) {
    for (int64_t row = chunk * size; row < std::min((chunk + 1) * size, num_rows); ++row) work(row);
  });
}

int64_t shared_bytes(int32_t num_ranks) { return num_ranks > MAX_RANKS ? 0 : HEADER + num_ranks * 2 * SLOT; }

int64_t shared_slot_bytes() { return SLOT; }

void shared_abort(Region *region) {
  region->aborted.store(1);
  for (Rank &rank : region->ranks) wake(rank);
}

bool shared_aborted(Region *region) { return region->aborted.load() != 0; }

EXPORT(shared_bytes);
EXPORT(shared_slot_bytes);
EXPORT(shared_abort);
EXPORT(shared_aborted);

}  // namespace

// x: rows of widths[rank] bytes, at most SLOT; out: concatenated rows of all ranks, null on a rank that does not
// receive.
OPERATOR(shared_gather, (Region *region, int32_t rank, int32_t num_ranks, bool spins, const char *x, int64_t num_rows, const int64_t *widths, char *out)) {
  Ranks ranks{*region, rank, num_ranks, spins};
  int64_t total = 0, widest = 1;
  for (int32_t i = 0; i < num_ranks; ++i) total += widths[i], widest = std::max(widest, widths[i]);
  const int64_t width = widths[rank], size = SLOT / widest;
  for (int64_t first = 0; first < num_rows; first += size) {
    const int64_t rows = std::min(size, num_rows - first);
    const bool is_complete = ranks.exchange(
        out != nullptr, [&](char *slot) { std::memcpy(slot, x + first * width, rows * width); },
        [&](int32_t peer, const char *slot) {
          int64_t before = 0;
          for (int32_t i = 0; i < peer; ++i) before += widths[i];
          for_rows(rows, widths[peer], [&](int64_t row) {
            std::memcpy(out + (first + row) * total + before, slot + row * widths[peer], widths[peer]);
          });
        });
    if (!is_complete) return;
  }
}

// rows, out: rows of `row_bytes` bytes, at most SLOT; row t of out is row t of rank owners[t].
OPERATOR(shared_owned_rows, (Region *region, int32_t rank, int32_t num_ranks, bool spins, const char *rows, int64_t num_rows, int64_t row_bytes,
                             const int64_t *owners, char *out)) {
  Ranks ranks{*region, rank, num_ranks, spins};
  const int64_t size = SLOT / std::max<int64_t>(row_bytes, 1);
  for (int64_t first = 0; first < num_rows; first += size) {
    const int64_t count = std::min(size, num_rows - first);
    const auto copy_owned = [&](int32_t owner, char *to, const char *from) {
      for_rows(count, row_bytes, [&](int64_t row) {
        if (owners[first + row] == owner) std::memcpy(to + row * row_bytes, from + row * row_bytes, row_bytes);
      });
    };
    const bool is_complete = ranks.exchange(
        true, [&](char *slot) { copy_owned(rank, slot, rows + first * row_bytes); },
        [&](int32_t peer, const char *slot) { copy_owned(peer, out + first * row_bytes, slot); });
    if (!is_complete) return;
  }
}
