#include "operator.h"

thread_local Recording *recording = nullptr;

extern "C" [[gnu::visibility("default")]] const Exported *first_exported() { return Exported::first; }

namespace {

// Executes and records the calls of this thread until end_recording.
Recording *begin_recording() { return recording = new Recording; }

void end_recording() { recording = nullptr; }

void replay(const Recording *recorded) {
  const auto &[calls, reads, num_reads] = *recorded;
  for (size_t i = 0; i < calls.size(); ++i) {
    expect_reads(reads.data() + num_reads[i], reads.size() - num_reads[i]);
    calls[i]();
  }
}

void free_recording(Recording *recorded) { delete recorded; }

EXPORT(begin_recording);
EXPORT(end_recording);
EXPORT(replay);
EXPORT(free_recording);

}  // namespace
