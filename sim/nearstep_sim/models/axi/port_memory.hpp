// `ideal` and `halfduplex`: memories with a data port and a latency, without banks or refresh.
//
// Bursts are answered in the order of their addresses, within reads and within writes. A write beat
// is taken only for a burst whose address has been taken. Up to kQueue bursts wait in each direction.
//
// ideal       A read beat and a write beat in every cycle.
// halfduplex  One beat in a cycle, read or write, and kTurnaround cycles without a beat when the
//             direction changes. As a controller, the memory batches directions: between bursts it
//             turns from reads to writes when kGather write bursts wait and as many reads have
//             been served, or when no read has been ready for kPatience cycles; and from writes to
//             reads when reads are ready and no write waits or kLongest writes have been served.
//             Only accepted bursts count.
#pragma once

#include <deque>

#include "models/memory.hpp"

namespace nearstep {

struct PortTiming {
    bool half_duplex;
    std::uint64_t latency;    // cycles from AR to the first R beat, from the last W beat to B
    std::uint32_t stall;      // chance of a stalled cycle on each channel, of 65536
    std::uint64_t seed;
    std::uint32_t host_ids = 0;   // IDs below are the host's, who may access every line
    std::uint32_t reads_all = 0;  // reads with IDs below may read every line, too
};

class PortMemory final : public Memory {
  public:
    static constexpr std::size_t kQueue = 16;
    static constexpr std::uint64_t kTurnaround = 4;
    static constexpr std::size_t kGather = 8;
    static constexpr std::size_t kLongest = 16;
    static constexpr std::uint64_t kPatience = 16;

    PortMemory(Store store, PortTiming timing)
        : store_(store), timing_(timing), random_(timing.seed) {}

    // Bit masks of the host's IDs that a peer uses now.
    std::uint32_t peer_writes = 0, peer_reads = 0;

    const SubordinatePins& pins() const override { return pins_; }

    void reset() override {
        reads_.clear();
        writes_.clear();
        responses_.clear();
        pins_ = {};
        writing_ = false;
        free_at_ = served_ = idle_ = 0;
        fault = {};
    }

    void tick(const ManagerPins& manager) override {
        take_response(manager);
        take_read_beat(manager);
        take_write_beat(manager);
        take_addresses(manager);
        ++now_;
        if (timing_.half_duplex) choose_direction();
        offer();
    }

  private:
    struct Burst {
        std::uint64_t address;
        std::uint64_t ready;
        unsigned beats, done;
        std::uint8_t id;
        Outcome outcome;
    };
    struct Answer {
        std::uint64_t address, ready;
        std::uint8_t id;
        Outcome outcome;
    };

    bool is_host(std::uint8_t id) const { return id < timing_.host_ids; }

    Burst accept(const AddressPins& pins, bool write) {
        const unsigned beats = pins.len + 1u;
        const bool peer = is_host(pins.id) && ((write ? peer_writes : peer_reads) >> pins.id & 1);
        const auto outcome =
            injections.of(is_host(pins.id) && !peer, write, pins.addr,
                          pins.addr + std::uint64_t(beats) * store_.beat_bytes(), peer);
        history.add(now_, write ? "AW" : "AR", pins.id, pins.addr, beats, 0);
        return {pins.addr, now_ + timing_.latency + (write ? 0 : outcome.delay), beats, 0, pins.id,
                outcome};
    }

    void take_addresses(const ManagerPins& manager) {
        if (pins_.arready && manager.ar.valid) reads_.push_back(accept(manager.ar, false));
        if (pins_.awready && manager.aw.valid) writes_.push_back(accept(manager.aw, true));
    }

    void take_read_beat(const ManagerPins& manager) {
        if (!(pins_.rvalid && manager.rready)) return;
        pins_.rvalid = false;
        ++counters.read_beats;
        if (++reads_.front().done < reads_.front().beats) return;
        const Burst& burst = reads_.front();
        history.add(now_, "R", burst.id, burst.address, burst.beats, burst.outcome.response);
        reads_.pop_front();
        ++served_;
    }

    void take_write_beat(const ManagerPins& manager) {
        if (!(pins_.wready && manager.wvalid)) return;
        Burst& burst = writes_.front();
        const std::uint64_t address = burst.address + std::uint64_t(burst.done) * store_.beat_bytes();
        if (burst.outcome.response == kOkay && !burst.outcome.never)
            store_.write(address, manager.wdata, manager.wstrb, fault, now_, is_host(burst.id));
        ++counters.write_beats;
        if (++burst.done < burst.beats) return;
        responses_.push_back(
            {burst.address, now_ + timing_.latency + burst.outcome.delay, burst.id, burst.outcome});
        writes_.pop_front();
        ++served_;
    }

    void take_response(const ManagerPins& manager) {
        if (!(pins_.bvalid && manager.bready)) return;
        pins_.bvalid = false;
        const Answer& answer = responses_.front();
        history.add(now_, "B", answer.id, answer.address, 0, answer.outcome.response);
        responses_.pop_front();
    }

    bool can_read() const {
        return !reads_.empty() && !reads_.front().outcome.never && reads_.front().ready <= now_;
    }

    bool in_burst() const {
        return writing_ ? !writes_.empty() && writes_.front().done != 0
                        : pins_.rvalid || (!reads_.empty() && reads_.front().done != 0);
    }

    void choose_direction() {
        if (now_ < free_at_ || in_burst()) return;
        bool turn;
        if (writing_) {
            idle_ = writes_.empty() ? idle_ + 1 : 0;
            turn = can_read() && (writes_.empty() || served_ >= kLongest);
        } else {
            idle_ = can_read() ? 0 : idle_ + 1;
            turn = !writes_.empty() &&
                   ((writes_.size() >= kGather && served_ >= kGather) || idle_ >= kPatience);
        }
        if (!turn) return;
        writing_ = !writing_;
        served_ = idle_ = 0;
        free_at_ = now_ + kTurnaround;
        ++counters.turnarounds;
    }

    bool stalled() { return random_.chance(timing_.stall); }

    void offer() {
        const bool bus = now_ >= free_at_;
        pins_.arready = reads_.size() < kQueue && !stalled();
        pins_.awready = writes_.size() < kQueue && !stalled();
        const bool may_read = !timing_.half_duplex || (bus && !writing_);
        const bool may_write = !timing_.half_duplex || (bus && writing_);
        pins_.wready = may_write && !writes_.empty() && !stalled();
        if (!pins_.rvalid && may_read && can_read() && !stalled()) offer_read_beat();
        if (!pins_.bvalid && !responses_.empty() && !responses_.front().outcome.never &&
            responses_.front().ready <= now_ && !stalled()) {
            pins_.bvalid = true;
            pins_.bid = responses_.front().id;
            pins_.bresp = responses_.front().outcome.response;
        }
    }

    void offer_read_beat() {
        const Burst& burst = reads_.front();
        pins_.rvalid = true;
        pins_.rid = burst.id;
        pins_.rresp = burst.outcome.response;
        pins_.rlast = burst.done + 1 == burst.beats;
        if (burst.outcome.response == kOkay)
            store_.read(burst.address + std::uint64_t(burst.done) * store_.beat_bytes(),
                        pins_.rdata, fault, now_,
                        is_host(burst.id) || burst.id < timing_.reads_all);
        else
            pins_.rdata.fill(0xEE);
    }

    Store store_;
    PortTiming timing_;
    Random random_;
    SubordinatePins pins_;
    std::deque<Burst> reads_, writes_;
    std::deque<Answer> responses_;
    std::uint64_t now_ = 0;
    bool writing_ = false;
    std::uint64_t free_at_ = 0, served_ = 0, idle_ = 0;
};

}  // namespace nearstep
