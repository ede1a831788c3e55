// The last bus transactions, for error reports.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>

namespace nearstep {

class History {
  public:
    void add(std::uint64_t cycle, const char* channel, unsigned id, std::uint64_t address,
             unsigned beats, unsigned response) {
        entries_[count_++ % kKept] = {cycle, channel, address, id, beats, response};
    }

    // One line a transaction, oldest first.
    std::string text() const {
        static constexpr const char* kResponses[] = {"OKAY", "EXOKAY", "SLVERR", "DECERR"};
        std::string lines;
        char line[128];
        const std::uint64_t first = count_ > kKept ? count_ - kKept : 0;
        for (std::uint64_t i = first; i < count_; ++i) {
            const Entry& e = entries_[i % kKept];
            if (e.channel[0] == 'A')
                std::snprintf(line, sizeof line, "cycle %llu: %s id %u, %u beats at %#llx\n",
                              (unsigned long long)e.cycle, e.channel, e.id, e.beats,
                              (unsigned long long)e.address);
            else
                std::snprintf(line, sizeof line, "cycle %llu: %s id %u, %s for %#llx\n",
                              (unsigned long long)e.cycle, e.channel, e.id,
                              kResponses[e.response & 3], (unsigned long long)e.address);
            lines += line;
        }
        return lines;
    }

  private:
    static constexpr std::size_t kKept = 32;
    struct Entry {
        std::uint64_t cycle = 0;
        const char* channel = "";
        std::uint64_t address = 0;
        unsigned id = 0, beats = 0, response = 0;
    };
    std::array<Entry, kKept> entries_{};
    std::uint64_t count_ = 0;
};

}  // namespace nearstep
