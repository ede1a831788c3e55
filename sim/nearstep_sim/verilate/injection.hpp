// Errors injected into a memory's answers; see nearstep.backends.emulated.Injection.
#pragma once

#include <cstdint>
#include <vector>

#include "models/axi/axi.hpp"

namespace nearstep {

enum class InjectionKind : std::int32_t { slverr = 0, decerr, never, late };

struct Injection {
    InjectionKind kind;
    std::int32_t write, host, peer;
    std::uint64_t base, limit, nth, times, delay;
};

// The errors injected into one burst.
struct Outcome {
    Response response = kOkay;
    bool never = false;
    std::uint64_t delay = 0;
};

class Injections {
  public:
    void add(const Injection& injection) { armed_.push_back({injection, 0}); }
    void clear() { armed_.clear(); }

    // The outcome of the burst [address, limit) of a kernel, the host or a peer; counts it.
    Outcome of(bool host, bool write, std::uint64_t address, std::uint64_t limit,
               bool peer = false) {
        Outcome outcome;
        for (auto& [rule, seen] : armed_) {
            if (bool(rule.host) != host || bool(rule.peer) != peer) continue;
            if (bool(rule.write) != write) continue;
            if (limit <= rule.base || address >= rule.limit) continue;
            const std::uint64_t index = seen++;
            if (index < rule.nth || index >= rule.nth + rule.times) continue;
            switch (rule.kind) {
                case InjectionKind::slverr: outcome.response = kSlverr; break;
                case InjectionKind::decerr: outcome.response = kDecerr; break;
                case InjectionKind::never: outcome.never = true; break;
                case InjectionKind::late: outcome.delay += rule.delay; break;
            }
        }
        return outcome;
    }

  private:
    struct Armed {
        Injection rule;
        std::uint64_t seen;
    };
    std::vector<Armed> armed_;
};

}  // namespace nearstep
