// An SDRAM chip alone: commands at clock edges, for tests of its rules.

#include "models/sdram/sdram.hpp"

namespace nearstep {

class SdramBench {
  public:
    SdramBench(const SdramTiming& timing, const SdramShape& shape, std::uint16_t* words)
        : t_(timing), chip_(timing, shape, words) {}

    // A clock edge with these pins, `since` after the inputs changed.
    void edge(const SdramPins& pins, std::uint64_t since) {
        now_ += t_.tck;
        chip_.edge(now_, pins, since, t_.tck - since);
    }

    // `edges` without a command.
    void idle(std::uint64_t edges) {
        const SdramPins none{1, 0, 1, 1, 1, 0, 0, 0, 0, 0};
        for (std::uint64_t i = 0; i < edges; ++i) edge(none, t_.tck / 2);
    }

    Sdram& chip() { return chip_; }
    std::uint64_t now() const { return now_; }

  private:
    SdramTiming t_;
    Sdram chip_;
    std::uint64_t now_ = 1'000'000;
};

}  // namespace nearstep

extern "C" {

using nearstep::SdramBench;

void* sdram_open(const nearstep::SdramTiming* timing, const nearstep::SdramShape* shape,
                 std::uint16_t* words) {
    return new SdramBench(*timing, *shape, words);
}
void sdram_close(SdramBench* bench) { delete bench; }
void sdram_edge(SdramBench* bench, const nearstep::SdramPins* pins, std::uint64_t since) {
    bench->edge(*pins, since);
}
void sdram_idle(SdramBench* bench, std::uint64_t edges) { bench->idle(edges); }

// The chip's data at a time after the last edge; -1 if not valid.
std::int32_t sdram_shows(SdramBench* bench, std::uint64_t after) {
    std::uint16_t word;
    return bench->chip().shows(bench->now() + after, &word) ? word : -1;
}

void sdram_inject(SdramBench* bench, const nearstep::SdramInjection* injection) {
    bench->chip().inject(*injection);
}

bool sdram_fault(SdramBench* bench, nearstep::Fault* fault) {
    *fault = bench->chip().fault;
    return bool(*fault);
}
}
