#include "recording.h"

thread_local Recording *recording = nullptr;

// From here on this thread's calls are made and recorded, until end_recording.
extern "C" Recording *begin_recording() { return recording = new Recording; }

extern "C" void end_recording() { recording = nullptr; }

extern "C" void replay(const Recording *calls) {
  for (const auto &call : *calls) call();
}

extern "C" void forget(Recording *calls) { delete calls; }
