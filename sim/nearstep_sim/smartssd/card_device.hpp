// What every simulated card has, whatever is between its registers, its memory and the host: accesses
// that take cycles, transfers of its drive and of the host's engine, and the functions that Python calls.
#pragma once

#include <algorithm>
#include <utility>

#include "models/bar_host.hpp"
#include "models/peer_dma.hpp"
#include "updater/shell_device.hpp"

namespace nearstep {

constexpr std::uint64_t kPollInterval = 4096;     // cycles between looks at a register in a wait
constexpr std::uint64_t kBarCycles = 1 << 18;     // a BAR that moves nothing for so long has hung
constexpr std::uint64_t kDrainCycles = 1 << 12;   // what a reset gives requests to be answered

class CardDevice : public ShellDevice {
  public:
    CardDevice(const Options& options, const BarLimits& limits, const PeerPacing& pacing)
        : ShellDevice(options), peer_(limits.payload, limits.request, pacing) {}

    // Ends when the card has taken the data; `flush` tells whether it got them to memory.
    virtual std::int32_t write(std::uint64_t address, const std::uint8_t* data,
                               std::uint64_t bytes) = 0;
    virtual std::int32_t read(std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) = 0;
    // Every posted write is answered.
    virtual std::int32_t flush() = 0;
    // The first failure since the last call.
    virtual BarFailure failure() = 0;
    virtual const BarCounters& counters() const = 0;
    virtual const BarCounters& peer_counters() const = 0;

    // As `wait`, but the end of a transfer of the drive ends it, too.
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

// `Host` is `BarHost`, or has its functions.
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

    // Runs while there is something to do, or until the end of a slice.
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

    // As `status`, unless something of the host's has failed.
    std::int32_t unless_failed(std::int32_t status) const {
        return status == kDone && host_.failure.response != kOkay ? kFailed : status;
    }

    // Nothing is under way.
    void forget() {
        host_.reset();
        hung_ = begun_ = waiting_ = false;
    }

    Host host_;
    std::uint64_t moved_at_ = 0;
    bool hung_ = false;
    bool begun_ = false;    // a transfer, which the next call goes on with
    bool waiting_ = false;  // for something to move, since `moved_at_` and over calls
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

// What the status `kFailed` is about; forgets it.
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

// The next of these transfers that has ended; 0 if nobody has to be told of one.
std::int32_t card_peer_ended(nearstep::ShellDevice* device, nearstep::PeerEnd* end) {
    const auto found = static_cast<nearstep::CardDevice*>(device)->peer().ended();
    if (found) *end = *found;
    return found.has_value();
}

void card_peer_counters(nearstep::ShellDevice* device, nearstep::BarCounters* counters) {
    *counters = static_cast<nearstep::CardDevice*>(device)->peer_counters();
}
}
