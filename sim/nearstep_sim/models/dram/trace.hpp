// Command trace: one command a line, fields apart by a space, "-" where a command has no such field.
#pragma once

#include <cstdio>
#include <string>

#include "models/dram/command.hpp"

namespace nearstep {

class TraceWriter {
  public:
    TraceWriter(const std::string& path, const std::string& header)
        : file_(std::fopen(path.c_str(), "w")) {
        if (file_) {
            std::setvbuf(file_, nullptr, _IOFBF, 1 << 16);
            std::fputs(header.c_str(), file_);
        }
    }
    ~TraceWriter() {
        if (file_) std::fclose(file_);
    }
    TraceWriter(const TraceWriter&) = delete;
    TraceWriter& operator=(const TraceWriter&) = delete;

    bool good() const { return file_ != nullptr; }
    void flush() { std::fflush(file_); }

    // row is the open row for a column command, negative if the bank is closed.
    void line(std::uint64_t ck, Command command, unsigned rank, const Pins& pins,
              std::int64_t row) {
        const auto at = static_cast<unsigned long long>(ck);
        switch (command) {
            case Command::PREA:
            case Command::REF:
            case Command::ZQCS:
            case Command::ZQCL:
                std::fprintf(file_, "%llu %s %u - - - -\n", at, name(command), rank);
                break;
            case Command::PRE:
                std::fprintf(file_, "%llu PRE %u %u %u - -\n", at, rank, pins.bg, pins.ba);
                break;
            case Command::ACT:
                std::fprintf(file_, "%llu ACT %u %u %u %u -\n", at, rank, pins.bg, pins.ba,
                             pins.address);
                break;
            case Command::MRS:
                std::fprintf(file_, "%llu MRS %u %u %u %u -\n", at, rank, pins.bg, pins.ba,
                             pins.address & kModeMask);
                break;
            case Command::OTHER:
                std::fprintf(file_, "# %llu unknown command, address %#x\n", at, pins.address);
                break;
            default:
                if (row < 0)
                    std::fprintf(file_, "%llu %s %u %u %u - %u\n", at, name(command), rank,
                                 pins.bg, pins.ba, pins.address & kColumnMask);
                else
                    std::fprintf(file_, "%llu %s %u %u %u %lld %u\n", at, name(command), rank,
                                 pins.bg, pins.ba, static_cast<long long>(row),
                                 pins.address & kColumnMask);
        }
    }

  private:
    std::FILE* file_;
};

}  // namespace nearstep
