// A fault of the kernel, found by an emulated memory or a checker. Only the first is kept.
#pragma once

#include <cstdint>
#include <cstdio>

namespace nearstep {

enum class FaultKind : std::int32_t { none = 0, out_of_range, unwritten, guard, protocol };

struct Fault {
    FaultKind kind = FaultKind::none;
    std::int32_t write = 0;
    std::uint64_t address = 0;
    std::uint64_t cycle = 0;
    char channel[8] = "";
    char rule[48] = "";
    char detail[120] = "";

    explicit operator bool() const { return kind != FaultKind::none; }

    void access(FaultKind what, std::uint64_t at, bool is_write, std::uint64_t now) {
        if (*this) return;
        kind = what;
        address = at;
        write = is_write;
        cycle = now;
    }

    template <class... Args>
    void protocol(const char* on, const char* broken, std::uint64_t now, const char* format,
                  Args... args) {
        if (*this) return;
        kind = FaultKind::protocol;
        cycle = now;
        std::snprintf(channel, sizeof channel, "%s", on);
        std::snprintf(rule, sizeof rule, "%s", broken);
        std::snprintf(detail, sizeof detail, format, args...);
    }
};

}  // namespace nearstep
