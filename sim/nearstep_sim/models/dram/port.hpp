// A DDR4 rank behind a PHY: several command slots and some bytes of data in a fabric cycle.
//
// Call once for each fabric cycle: read_data() for rddata of this cycle; command() for each
// selected phase, in order; end_cycle() with this cycle's wrdata.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "models/dram/ddr4.hpp"

namespace nearstep {

struct PortConfig {
    std::int32_t phases;       // command slots in a fabric cycle
    std::int32_t data_bytes;   // 64: a burst in a cycle; 32: in two
    std::int32_t read_latency;   // fabric cycles from a read command to its first data
    std::int32_t write_latency;  // fabric cycles from a write command to its first data
};

class Ddr4Port {
  public:
    Ddr4Port(Ddr4Device& device, const PortConfig& config) : device_(device), config_(config) {
        const int pieces = kBeatBytes / config.data_bytes;
        if (pieces * config.data_bytes != kBeatBytes || pieces > 2)
            throw std::invalid_argument("data_bytes must be 64 or 32");
        if (config.phases < 1 || config.read_latency < 1 || config.write_latency < 0)
            throw std::invalid_argument("phases and read_latency must be at least 1");
        // Contents are read with the command and written with the last data: the write must be done
        // at the earliest read of the same bank group.
        const int landed = (config.write_latency + pieces) * config.phases;
        if (landed > device.timing().write_to_read_l())
            throw std::invalid_argument("write_latency is longer than the timing's CWL");
        slots_.resize(1);
        while (slots_.size() < std::size_t(std::max(config.read_latency, config.write_latency) + 3))
            slots_.resize(slots_.size() * 2);
        pieces_ = pieces;
    }

    std::uint64_t cycle() const { return cycle_; }
    std::uint64_t clock() const { return cycle_ * config_.phases; }
    // rddata of this cycle; null while rddata_valid is low.
    const std::uint8_t* read_data() const {
        const Slot& slot = at(0);
        return slot.read ? slot.data : nullptr;
    }
    // Whether wrdata_en must be high in this cycle.
    bool expects_write() const { return at(0).write; }

    bool command(unsigned phase, const Pins& pins) {
        if (!device_.command(clock() + phase, pins)) return false;
        switch (decode(pins)) {
            case Command::RD:
            case Command::RDA: return start_read(pins);
            case Command::WR:
            case Command::WRA: return start_write(pins);
            default: return true;
        }
    }

    // A set bit of mask keeps the byte in memory. False once a rule was violated.
    bool end_cycle(bool wrdata_en, const std::uint8_t* wrdata, std::uint64_t mask) {
        Slot& slot = at(0);
        if (wrdata_en != slot.write) [[unlikely]]
            device_.fail_data(slot.write ? "CWL: no write data" : "CWL: write data of no command",
                              clock());
        if (slot.write) {
            if (!device_.failed()) take(slot, wrdata, mask);
            slot.write = false;
        }
        slot.read = false;
        ++cycle_;
        if ((cycle_ & 1023) == 0) device_.advance(clock());
        return !device_.failed();
    }

    std::uint64_t uninitialised_reads() const { return uninitialised_; }
    Ddr4Device& device() { return device_; }

  private:
    struct Slot {
        bool read = false, write = false;
        std::uint8_t piece = 0;  // of the write burst
        Place place{};
        std::uint8_t data[kBeatBytes];
    };

    Slot& at(int ahead) { return slots_[(cycle_ + ahead) & (slots_.size() - 1)]; }
    const Slot& at(int ahead) const { return slots_[(cycle_ + ahead) & (slots_.size() - 1)]; }

    bool start_read(const Pins& pins) {
        std::uint8_t beat[kBeatBytes];
        if (!device_.storage().read(device_.place(pins), beat)) ++uninitialised_;
        for (int i = 0; i < pieces_; ++i) {
            Slot& slot = at(config_.read_latency + i);
            if (slot.read) return device_.fail_data("data bus: two reads", clock());
            slot.read = true;
            std::memcpy(slot.data, beat + i * config_.data_bytes, config_.data_bytes);
        }
        return true;
    }
    bool start_write(const Pins& pins) {
        for (int i = 0; i < pieces_; ++i) {
            Slot& slot = at(config_.write_latency + i);
            if (slot.write) return device_.fail_data("data bus: two writes", clock());
            slot.write = true;
            slot.piece = static_cast<std::uint8_t>(i);
            slot.place = device_.place(pins);
        }
        return true;
    }
    void take(const Slot& slot, const std::uint8_t* wrdata, std::uint64_t mask) {
        if (pieces_ == 1) {
            device_.storage().write(slot.place, wrdata, mask);
        } else if (slot.piece == 0) {
            std::memcpy(half_, wrdata, kBeatBytes / 2);
            half_mask_ = static_cast<std::uint32_t>(mask);
        } else {
            std::memcpy(half_ + kBeatBytes / 2, wrdata, kBeatBytes / 2);
            device_.storage().write(slot.place, half_, half_mask_ | mask << 32);
        }
    }

    Ddr4Device& device_;
    PortConfig config_;
    std::vector<Slot> slots_;
    int pieces_ = 1;
    std::uint64_t cycle_ = 0, uninitialised_ = 0;
    std::uint8_t half_[kBeatBytes];
    std::uint64_t half_mask_ = 0;
};

}  // namespace nearstep
