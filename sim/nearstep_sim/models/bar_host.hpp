// The host's side of a memory BAR: requests of the link, as they come out of a PCIe endpoint on AXI4.
//
// A write is posted requests of at most `payload` bytes, a read requests of at most `request`, all
// ending where that divides the address, so that none crosses a page; a completion ends where
// `payload` divides the address, and so at the read completion boundary. The link counts in words of
// four bytes, whose first and last can be enabled in part. Each request is one burst. A read is not
// issued before every posted write was answered.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "models/axi/axi.hpp"

namespace nearstep {

struct BarLimits {
    std::uint64_t payload, request;  // powers of two
};

struct BarCounters {
    std::uint64_t write_tlps = 0, write_bytes = 0, read_tlps = 0;      // to the device
    std::uint64_t completion_tlps = 0, completion_bytes = 0;           // from it
};

constexpr std::int32_t kTimedOut = 4;  // in place of a response

struct BarFailure {
    std::int32_t response = kOkay;
    std::int32_t write = 0;
    std::uint64_t address = 0;
};

class BarHost {
  public:
    static constexpr std::uint64_t kWord = 4;
    static constexpr unsigned kTags = 16;  // reads outstanding: IDs of the port
    static constexpr std::size_t kPosted = 32;

    BarHost(unsigned beat_bytes, BarLimits limits) : beat_(beat_bytes), limits_(limits) {
        while ((1u << size_) < beat_bytes) ++size_;
        pins_.rready = pins_.bready = true;
    }

    void reset() {
        pins_ = {};
        pins_.rready = pins_.bready = true;
        write_at_ = write_end_ = read_at_ = read_end_ = 0;
        bursts_.clear();
        unanswered_.clear();
        kept_.clear();
        tags_ = {};
        failure = {};
    }

    // The rest of a transfer is not wanted, and its data are the caller's again. What the device was
    // promised it still gets; what it still gives goes nowhere.
    void abandon() {
        write_end_ = write_at_;
        read_end_ = read_at_;
        for (Burst& burst : bursts_) {
            kept_.emplace_back(burst.data, burst.data + (burst.end - burst.at));
            burst.data = kept_.back().data();
        }
        for (Read& read : tags_) read.dropped = true;
    }

    // Begins a write of bytes that stay where they are until it is no longer `sending`.
    void write(std::uint64_t address, const std::uint8_t* data, std::uint64_t bytes) {
        write_base_ = write_at_ = address;
        write_end_ = address + bytes;
        source_ = data;
    }

    // Begins a read. Bytes that were answered with an error stay as they are in `out`.
    void read(std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) {
        read_base_ = read_at_ = address;
        read_end_ = address + bytes;
        sink_ = out;
    }

    // Data of a write have to be handed over.
    bool sending() const { return write_at_ < write_end_ || !bursts_.empty() || pins_.wvalid; }
    // Writes have to be answered.
    bool posted() const { return !unanswered_.empty(); }
    // A read has to be answered.
    bool reading() const {
        return read_at_ < read_end_ ||
               std::any_of(tags_.begin(), tags_.end(), [](const Read& read) { return read.used; });
    }

    // A read with this ID has to be answered.
    bool expects(unsigned id) const { return id < kTags && tags_[id].used; }

    const ManagerPins& pins() const { return pins_; }

    // The clock edge that ends a cycle in which the device drove `device`. True if it moved anything.
    bool tick(const SubordinatePins& device) {
        bool moved = false;
        if (pins_.aw.valid && device.awready) {
            pins_.aw = {};
            moved = true;
        }
        if (pins_.ar.valid && device.arready) {
            pins_.ar = {};
            moved = true;
        }
        if (pins_.wvalid && device.wready) {
            pins_.wvalid = false;
            moved = true;
        }
        if (device.bvalid) {
            if (device.bresp != kOkay) fail(device.bresp, true, unanswered_.front());
            unanswered_.pop_front();
            moved = true;
        }
        if (device.rvalid) {
            take(device);
            moved = true;
        }
        offer();
        return moved;
    }

    // What is outstanding is given up.
    void time_out() {
        if (sending() || posted())
            fail(kTimedOut, true, posted() ? unanswered_.front() : write_at_);
        else
            for (const Read& read : tags_)
                if (read.used) fail(kTimedOut, false, read.at);
    }

    // A register access, which is a request of its own.
    void count_register(bool write) {
        if (write) {
            ++counters.write_tlps;
            counters.write_bytes += kWord;
        } else {
            ++counters.read_tlps;
            ++counters.completion_tlps;
            counters.completion_bytes += kWord;
        }
    }

    BarCounters counters;
    BarFailure failure;  // the first since it was cleared

  private:
    struct Burst {
        std::uint64_t at, end;  // bytes that are to be sent
        const std::uint8_t* data;
    };
    struct Read {
        std::uint64_t at, end, beat;  // bytes of the request, and the beat that comes next
        bool used, failed, dropped;
    };

    void fail(std::int32_t response, bool write, std::uint64_t address) {
        if (failure.response == kOkay) failure = {response, write, address};
    }

    static std::uint64_t words(std::uint64_t at, std::uint64_t end) {
        return (end + kWord - 1) / kWord - at / kWord;
    }

    std::uint64_t down(std::uint64_t address) const { return address / beat_ * beat_; }

    AddressPins burst(unsigned id, std::uint64_t at, std::uint64_t end) const {
        const std::uint64_t beats = (end - down(at) + beat_ - 1) / beat_;
        return {true, std::uint8_t(id), down(at), std::uint8_t(beats - 1), size_, 1};
    }

    void offer() {
        if (!pins_.aw.valid && write_at_ < write_end_ && unanswered_.size() < kPosted) {
            const std::uint64_t end = cut(write_at_, write_end_, limits_.payload);
            pins_.aw = burst(0, write_at_, end);
            bursts_.push_back({write_at_, end, source_ + (write_at_ - write_base_)});
            unanswered_.push_back(write_at_);
            ++counters.write_tlps;
            counters.write_bytes += kWord * words(write_at_, end);
            write_at_ = end;
        }
        if (!pins_.wvalid && !bursts_.empty()) offer_beat();
        if (!pins_.ar.valid && read_at_ < read_end_ && unanswered_.empty()) offer_read();
    }

    void offer_beat() {
        Burst& burst = bursts_.front();
        const std::uint64_t beat = down(burst.at);
        const std::uint64_t end = std::min(burst.end, beat + beat_);
        pins_.wvalid = true;
        pins_.wlast = end == burst.end;
        pins_.wstrb = 0;
        for (std::uint64_t at = burst.at; at < end; ++at) pins_.wstrb |= 1ull << (at - beat);
        std::copy_n(burst.data, end - burst.at, pins_.wdata.begin() + (burst.at - beat));
        burst.data += end - burst.at;
        burst.at = end;
        if (pins_.wlast) bursts_.pop_front();
        if (bursts_.empty()) kept_.clear();
    }

    void offer_read() {
        const auto free = std::find_if(tags_.begin(), tags_.end(),
                                       [](const Read& read) { return !read.used; });
        if (free == tags_.end()) return;
        const std::uint64_t end = cut(read_at_, read_end_, limits_.request);
        *free = {read_at_, end, down(read_at_), true, false, false};
        pins_.ar = burst(unsigned(free - tags_.begin()), read_at_, end);
        ++counters.read_tlps;
        read_at_ = end;
    }

    void take(const SubordinatePins& device) {
        Read& read = tags_[device.rid];
        const std::uint64_t at = std::max(read.at, read.beat);
        const std::uint64_t end = std::min(read.end, read.beat + beat_);
        if (device.rresp != kOkay) {
            if (!read.dropped) fail(device.rresp, false, at);
            read.failed = true;
        } else if (at < end && !read.dropped) {
            std::copy_n(device.rdata.begin() + (at - read.beat), end - at,
                        sink_ + (at - read_base_));
        }
        read.beat += beat_;
        if (!device.rlast) return;
        read.used = false;
        if (read.failed) {
            ++counters.completion_tlps;  // says so, and has no data
            return;
        }
        const std::uint64_t first = read.at / limits_.payload;
        counters.completion_tlps += (read.end - 1) / limits_.payload - first + 1;
        counters.completion_bytes += kWord * words(read.at, read.end);
    }

    // The end of a request that begins at `at` and is followed by others up to `end`.
    static std::uint64_t cut(std::uint64_t at, std::uint64_t end, std::uint64_t most) {
        return std::min(end, at / most * most + most);
    }

    unsigned beat_;
    std::uint8_t size_ = 0;
    BarLimits limits_;
    ManagerPins pins_;
    const std::uint8_t* source_ = nullptr;
    std::uint8_t* sink_ = nullptr;
    std::uint64_t write_base_ = 0, write_at_ = 0, write_end_ = 0;
    std::uint64_t read_base_ = 0, read_at_ = 0, read_end_ = 0;
    std::deque<Burst> bursts_;
    std::deque<std::vector<std::uint8_t>> kept_;  // data of bursts whose write was abandoned
    std::deque<std::uint64_t> unanswered_;        // addresses of posted writes, oldest first
    std::array<Read, kTags> tags_{};
};

}  // namespace nearstep
