// Common to all simulated cards: accesses that take cycles, transfers of the drive and of the
// host's DMA engine, and the functions that Python calls.
#pragma once

#include <algorithm>
#include <utility>

#include "models/bar_host.hpp"
#include "models/peer_dma.hpp"
#include "updater/shell_device.hpp"

namespace nearstep {

constexpr std::uint64_t kPollInterval = 4096;     // cycles between looks at a register in a wait
constexpr std::uint64_t kBarCycles = 1 << 18;     // a BAR without progress for longer has hung
constexpr std::uint64_t kDrainCycles = 1 << 12;   // most cycles for answers before a reset

class CardDevice : public ShellDevice {
  public:
    CardDevice(const Options& options, const BarLimits& limits, const PeerPacing& pacing)
        : ShellDevice(options), peer_(limits.payload, limits.request, pacing) {}

    // Ends when the card has taken the data; `flush` reports whether memory has.
    virtual std::int32_t write(std::uint64_t address, const std::uint8_t* data,
                               std::uint64_t bytes) = 0;
    virtual std::int32_t read(std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) = 0;
    // Waits until every posted write is answered.
    virtual std::int32_t flush() = 0;
    // The first failure since the last call.
    virtual BarFailure failure() = 0;
    virtual const BarCounters& counters() const = 0;
    virtual const BarCounters& peer_counters() const = 0;

    // As `wait`, but also ends with a transfer of the drive.
    std::int32_t advance(const Poll* polls, std::size_t count, std::uint64_t max_cycles) {
        ended_ = peer_.count();
        advancing_ = true;
        const auto status = wait(polls, count, max_cycles);
        advancing_ = false;
        return status;
    }

    PeerDma& peer() { return peer_; }

  protected:
    virtual void step() = 0;

    bool woken() const override { return advancing_ && peer_.count() != ended_; }

    void sleep(std::uint64_t limit) override {
        const std::uint64_t until = std::min(limit, cycle() + kPollInterval);
        while (cycle() < until && !memory().fault && !interrupted_ && !woken()) step();
        interrupted_ = false;
    }

    PeerDma peer_;
    bool interrupted_ = false;  // since the last sleep

  private:
    bool advancing_ = false;
    std::uint64_t ended_ = 0;  // transfers of the drive, before `advance`
};

// `Host`: `BarHost`, or a class with the same functions.
template <class Host>
class HostedCard : public CardDevice {
  public:
    template <class... More>
    HostedCard(const Options& options, const BarLimits& limits, const PeerPacing& pacing,
               More... more)
        : CardDevice(options, limits, pacing), host_(more..., &peer_) {}

    void reset() override {
        const std::uint64_t limit = cycle() + kDrainCycles;
        peer_.give_up();
        while ((host_.posted() || host_.serves_dma()) && cycle() < limit && !memory().fault &&
               !hung_)
            step();
        reset_card();
    }

    void abandon() override {
        host_.abandon();
        begun_ = waiting_ = false;
    }

    std::int32_t write(std::uint64_t address, const std::uint8_t* data,
                       std::uint64_t bytes) override {
        if (!std::exchange(begun_, true)) host_.write(address, data, bytes);
        const auto status = run([this] { return host_.sending(); });
        begun_ = status == kMore;
        return status;
    }

    BarFailure failure() override { return std::exchange(host_.failure, {}); }
    const BarCounters& counters() const override { return host_.counters; }
    const BarCounters& peer_counters() const override { return host_.peer_counters; }

  protected:
    virtual void reset_card() = 0;

    // Runs while `busy`, at most to the end of a slice.
    template <class Busy>
    std::int32_t run(Busy busy) {
        if (memory().fault) return kFaulted;
        if (hung_) return kHung;
        const std::uint64_t slice = cycle() + kSliceCycles;
        if (!std::exchange(waiting_, false)) moved_at_ = cycle();
        while (busy()) {
            if (cycle() >= slice) {
                waiting_ = true;
                return kMore;
            }
            step();
            if (memory().fault) return kFaulted;
            if (cycle() - moved_at_ > kBarCycles) {
                hung_ = true;
                host_.time_out();
                return kFailed;
            }
        }
        return kDone;
    }

    // `status`, or `kFailed` if an access of the host has failed.
    std::int32_t unless_failed(std::int32_t status) const {
        return status == kDone && host_.failure.response != kOkay ? kFailed : status;
    }

    // Drops all outstanding accesses.
    void forget() {
        host_.reset();
        hung_ = begun_ = waiting_ = false;
    }

    Host host_;
    std::uint64_t moved_at_ = 0;
    bool hung_ = false;
    bool begun_ = false;    // a transfer, which the next call continues
    bool waiting_ = false;  // for progress, since `moved_at_`, over several calls
};

}  // namespace nearstep

extern "C" {

std::int32_t card_write(nearstep::ShellDevice* device, std::uint64_t address,
                        const std::uint8_t* data, std::uint64_t bytes) {
    return static_cast<nearstep::CardDevice*>(device)->write(address, data, bytes);
}

std::int32_t card_read(nearstep::ShellDevice* device, std::uint64_t address, std::uint8_t* out,
                       std::uint64_t bytes) {
    return static_cast<nearstep::CardDevice*>(device)->read(address, out, bytes);
}

std::int32_t card_flush(nearstep::ShellDevice* device) {
    return static_cast<nearstep::CardDevice*>(device)->flush();
}

// Returns and clears the failure behind status `kFailed`.
void card_failure(nearstep::ShellDevice* device, nearstep::BarFailure* failure) {
    *failure = static_cast<nearstep::CardDevice*>(device)->failure();
}

void card_counters(nearstep::ShellDevice* device, nearstep::BarCounters* counters) {
    *counters = static_cast<nearstep::CardDevice*>(device)->counters();
}

std::int32_t card_advance(nearstep::ShellDevice* device, const nearstep::Poll* polls,
                          std::uint64_t count, std::uint64_t max_cycles) {
    return static_cast<nearstep::CardDevice*>(device)->advance(polls, count, max_cycles);
}

void card_submit_write(nearstep::ShellDevice* device, std::uint64_t number, std::uint64_t address,
                       std::uint8_t* data, std::uint64_t bytes, std::int32_t host) {
    auto& peer = static_cast<nearstep::CardDevice*>(device)->peer();
    (host ? peer.host_writes : peer.writes).submit(number, address, data, bytes, device->cycle());
}

void card_submit_read(nearstep::ShellDevice* device, std::uint64_t number, std::uint64_t address,
                      std::uint8_t* out, std::uint64_t bytes, std::int32_t host) {
    auto& peer = static_cast<nearstep::CardDevice*>(device)->peer();
    (host ? peer.host_reads : peer.reads).submit(number, address, out, bytes, device->cycle());
}

// The oldest end of these transfers not yet returned; 0 if there is none.
std::int32_t card_peer_ended(nearstep::ShellDevice* device, nearstep::PeerEnd* end) {
    const auto found = static_cast<nearstep::CardDevice*>(device)->peer().ended();
    if (found) *end = *found;
    return found.has_value();
}

void card_peer_counters(nearstep::ShellDevice* device, nearstep::BarCounters* counters) {
    *counters = static_cast<nearstep::CardDevice*>(device)->peer_counters();
}
}
