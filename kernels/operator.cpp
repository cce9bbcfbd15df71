#include "operator.h"

thread_local Recording *recording = nullptr;

extern "C" [[gnu::visibility("default")]] const Exported *first_exported() { return Exported::first; }

namespace {

// Executes and records the calls of this thread until end_recording.
Recording *begin_recording() { return recording = new Recording; }

void end_recording() { recording = nullptr; }

void replay(const Recording *calls) {
  for (const auto &call : *calls) call();
}

void free_recording(Recording *calls) { delete calls; }

EXPORT(begin_recording);
EXPORT(end_recording);
EXPORT(replay);
EXPORT(free_recording);

}  // namespace
