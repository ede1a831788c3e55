// Transfers of DMA engines to and from the memory of a card, its drive's and the host's, cut into
// requests of the link that the port of a memory BAR carries out: see bar_host.hpp.
//
// Each direction has a queue: requests in order of submission, as many outstanding as the port
// allows. A direction can have a rate: the request that ends with byte n of a transfer is due when
// the drive can have moved n bytes since the later of the end of the transfer's latency and the end
// of the transfer before. A half-duplex drive moves bytes of each direction in half of the cycles
// while it could move some of both. Arithmetic is in integers: bytes times twice the clock's hertz.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "models/axi/axi.hpp"

namespace nearstep {

constexpr std::int32_t kTimedOut = 4;  // in place of a response
constexpr std::int32_t kGivenUp = 5;

struct PeerPacing {
    std::uint64_t clock_hz;
    std::uint64_t read_rate;   // bytes a second that the drive reads, to memory; 0 is no bound
    std::uint64_t write_rate;  // bytes a second that the drive writes, from memory; 0 is no bound
    std::uint64_t latency;     // cycles before a transfer's first byte
    std::uint64_t half_duplex;
};

// How a transfer ended.
struct PeerEnd {
    std::uint64_t number, cycle, address;
    std::int32_t response;
    std::int32_t write;
};

struct PeerRequest {
    std::uint64_t number, at, end;
    std::uint8_t* data;
};

class PeerQueue {
  public:
    // Most bytes that a drive buffers while the port serves other requests: a usual command.
    static constexpr std::uint64_t kBuffered = 128 << 10;
    static constexpr std::uint64_t kCycles = 1 << 18;  // without an answer: a timeout

    PeerQueue(bool write, std::uint64_t most, std::uint64_t hz, std::uint64_t rate,
              std::uint64_t latency, std::deque<PeerEnd>& ended)
        : write_(write), most_(most), hz_(2 * hz), rate_(rate), latency_(latency), ended_(ended) {}

    // Whether the drive takes time in the cycle that ends.
    bool moves(std::uint64_t now) const {
        const Transfer* next = issuing();
        return rate_ != 0 && next != nullptr && now > next->ready && credit_ < kBuffered * hz_;
    }

    // Numbers ascend. `bytes` is not 0; `data` must stay valid until the transfer ends.
    void submit(std::uint64_t number, std::uint64_t address, std::uint8_t* data,
                std::uint64_t bytes, std::uint64_t now) {
        transfers_.push_back(
            {number, address, address, address + bytes, now + latency_, data, {}, kOkay, 0});
        now_ = now;
        if (transfers_.size() == 1) moved_at_ = now;
    }

    // Ends a cycle; `now`: cycles so far; `halves` of the cycle that the drive had.
    void pass(std::uint64_t now, std::uint64_t halves = 2) {
        now_ = now;
        if (transfers_.empty()) return;
        const Transfer* next = issuing();
        if (next == nullptr || now <= next->ready)
            credit_ = 0;
        else
            credit_ = std::min(credit_ + rate_ * halves, kBuffered * hz_);
        const bool waits = !transfers_.front().outstanding.empty() || due();
        if (!waits) moved_at_ = now;
        if (now - moved_at_ > kCycles) {
            const Transfer& front = transfers_.front();
            const auto at = front.outstanding.empty() ? front.at : front.outstanding.front();
            drop_front(kTimedOut, at);
            moved_at_ = now;
        }
    }

    // The request that can be issued now.
    std::optional<PeerRequest> due() const {
        const Transfer* next = issuing();
        if (next == nullptr || now_ < next->ready) return {};
        const std::uint64_t end = std::min(next->end, next->at / most_ * most_ + most_);
        if (rate_ != 0 && credit_ < (end - next->at) * hz_) return {};
        return PeerRequest{next->number, next->at, end, next->data + (next->at - next->begin)};
    }

    void issue(const PeerRequest& request) {
        Transfer& next = transfers_[issuing_];
        if (rate_ != 0) credit_ -= (request.end - request.at) * hz_;
        next.outstanding.push_back(request.at);
        next.at = request.end;
        if (next.at == next.end) ++issuing_;
        moved_at_ = now_;
    }

    // Whether the transfer has not ended: its data may be accessed.
    bool wants(std::uint64_t number) const { return find(number) != transfers_.size(); }

    // A part of a request was answered with an error.
    void fail(std::uint64_t number, std::int32_t response, std::uint64_t address) {
        const std::size_t index = find(number);
        if (index == transfers_.size() || transfers_[index].response != kOkay) return;
        transfers_[index].response = response;
        transfers_[index].address = address;
    }

    // The request that begins at `address` was answered, whole.
    void answer(std::uint64_t number, std::uint64_t address) {
        const std::size_t index = find(number);
        if (index == transfers_.size()) return;
        auto& left = transfers_[index].outstanding;
        left.erase(std::find(left.begin(), left.end(), address));
        moved_at_ = now_;
        while (!transfers_.empty()) {
            const Transfer& front = transfers_.front();
            if (front.at != front.end || !front.outstanding.empty()) return;
            drop_front(front.response, front.address);
        }
    }

    void give_up() {
        while (!transfers_.empty()) drop_front(kGivenUp, transfers_.front().at);
    }

  private:
    struct Transfer {
        std::uint64_t number, begin, at, end, ready;
        std::uint8_t* data;
        std::vector<std::uint64_t> outstanding;  // where requests begin, oldest first
        std::int32_t response;
        std::uint64_t address;
    };

    const Transfer* issuing() const {
        return issuing_ < transfers_.size() ? &transfers_[issuing_] : nullptr;
    }

    std::size_t find(std::uint64_t number) const {
        const auto at = std::lower_bound(
            transfers_.begin(), transfers_.end(), number,
            [](const Transfer& each, std::uint64_t wanted) { return each.number < wanted; });
        const bool found = at != transfers_.end() && at->number == number;
        return found ? std::size_t(at - transfers_.begin()) : transfers_.size();
    }

    void drop_front(std::int32_t response, std::uint64_t address) {
        ended_.push_back({transfers_.front().number, now_, address, response, write_});
        transfers_.pop_front();
        if (issuing_ > 0) --issuing_;
    }

    bool write_;
    std::uint64_t most_, hz_, rate_, latency_;
    std::deque<PeerEnd>& ended_;
    std::deque<Transfer> transfers_;
    std::size_t issuing_ = 0;   // the first transfer with requests to issue
    std::uint64_t credit_ = 0;  // unused bytes of the drive, times twice the hertz
    std::uint64_t now_ = 0, moved_at_ = 0;
};

class PeerDma {
  public:
    // Requests have at most `payload` bytes to memory, and `request` bytes from it.
    PeerDma(std::uint64_t payload, std::uint64_t request, const PeerPacing& pacing)
        : writes(true, payload, pacing.clock_hz, pacing.read_rate, pacing.latency, ended_),
          reads(false, request, pacing.clock_hz, pacing.write_rate, pacing.latency, ended_),
          host_writes(true, payload, pacing.clock_hz, 0, 0, ended_),
          host_reads(false, request, pacing.clock_hz, 0, 0, ended_),
          half_duplex_(pacing.half_duplex != 0) {}

    PeerDma(const PeerDma&) = delete;
    PeerDma& operator=(const PeerDma&) = delete;

    void pass(std::uint64_t now) {
        const bool shared = half_duplex_ && writes.moves(now) && reads.moves(now);
        writes.pass(now, shared ? 1 : 2);
        reads.pass(now, shared ? 1 : 2);
        host_writes.pass(now);
        host_reads.pass(now);
    }

    void give_up() {
        for (PeerQueue* queue : queues()) queue->give_up();
    }

    // The oldest end that was not yet returned.
    std::optional<PeerEnd> ended() {
        if (ended_.empty()) return {};
        const PeerEnd end = ended_.front();
        ended_.pop_front();
        ++told_;
        return end;
    }

    // Transfers that have ended.
    std::uint64_t count() const { return told_ + ended_.size(); }

    PeerQueue writes, reads;            // the drive's
    PeerQueue host_writes, host_reads;  // the host's, without a rate

  private:
    std::array<PeerQueue*, 4> queues() { return {&writes, &reads, &host_writes, &host_reads}; }

    std::deque<PeerEnd> ended_;  // not yet returned
    std::uint64_t told_ = 0;
    bool half_duplex_;
};

}  // namespace nearstep
