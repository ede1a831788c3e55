// Points of coverage of every model in this library; their counts are written when the process ends,
// to a file of its own in the folder $NEARSTEP_COVERAGE.

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "verilated.h"
#include "verilated_cov.h"

namespace {

class Counts {
  public:
    // A new context would become the thread's.
    Counts() : before_{Verilated::threadContextp()} { Verilated::threadContextp(before_); }
    VerilatedCovContext* points() { return context_.coveragep(); }

    ~Counts() {
        const char* folder = std::getenv("NEARSTEP_COVERAGE");
        if (folder == nullptr || *folder == '\0') return;
        const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
        const std::string name = std::to_string(getpid()) + "-" + std::to_string(now);
        std::filesystem::create_directories(folder);
        points()->write(std::string{folder} + "/" + name + ".dat");
    }

  private:
    VerilatedContext* before_;
    VerilatedContext context_;
};

}  // namespace

VerilatedCovContext* nearstep_coverage() {
    static Counts counts;
    return counts.points();
}
