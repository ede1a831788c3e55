// The link between a client and its memory device: pushes up and pulls down, in parallel.
//
// A direction moves a phit of 16 bytes every `interval` cycles, and carries one transfer at a time,
// as requests to the device's window of at most kRequest bytes, none of which crosses a multiple of
// kRequest. A request of a push is issued when all of its bytes have been received, a request of a
// pull when the link has credit for its bytes. While the window serves other requests, a direction
// collects credit for kBuffered bytes at most; beyond that its time is lost. `latency` cycles pass
// before the first byte of a transfer, and after the last byte of a pull.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>

#include "models/peer_dma.hpp"

namespace nearstep {

struct ClientOptions {
    std::uint64_t interval = 1;  // cycles for each phit
    std::uint64_t latency = 1;   // cycles from one end to the other
};

class ClientLane {
  public:
    static constexpr std::uint64_t kPhitBytes = 16;
    static constexpr std::uint64_t kRequest = 1024;
    static constexpr std::uint64_t kBuffered = 4 * kRequest;
    static constexpr std::uint64_t kOutstanding = 16;  // requests without an answer

    ClientLane(PeerQueue& queue, bool write, const ClientOptions& options)
        : queue_(queue), write_(write), options_(options) {}

    // `bytes` is not 0; `data` must stay valid until the transfer ends.
    void submit(std::uint64_t number, std::uint64_t address, std::uint8_t* data,
                std::uint64_t bytes, std::uint64_t now) {
        transfers_.push_back({number, address, address, address + bytes, address,
                              now + options_.latency, data, kOkay, 0});
    }

    void pass(std::uint64_t now) {
        if (issuing_ == transfers_.size()) return;
        Transfer& next = transfers_[issuing_];
        if (now <= next.ready) {
            credit_ = 0;
            return;
        }
        credit_ = std::min(credit_ + kPhitBytes, kBuffered * options_.interval);
        const std::uint64_t end = std::min(next.end, next.at / kRequest * kRequest + kRequest);
        const std::uint64_t cost = (end - next.at) * options_.interval;
        if (credit_ < cost || outstanding_ == kOutstanding) return;
        credit_ -= cost;
        ++outstanding_;
        queue_.submit(++requests_, next.at, next.data + (next.at - next.begin), end - next.at, now);
        next.at = end;
        if (next.at == next.end) ++issuing_;
    }

    // The oldest request has ended. Returns the end of its transfer with the last request.
    std::optional<PeerEnd> answer(const PeerEnd& request) {
        --outstanding_;
        Transfer& front = transfers_.front();
        if (request.response != kOkay && front.response == kOkay) {
            front.response = request.response;
            front.address = request.address;
        }
        const std::uint64_t ended = front.ended + kRequest;
        front.ended = ended / kRequest * kRequest;
        if (front.ended < front.end) return {};
        const std::uint64_t way = write_ ? 0 : options_.latency;
        const PeerEnd end{front.number, request.cycle + way, front.address, front.response, write_};
        transfers_.pop_front();
        --issuing_;
        return end;
    }

    // Drops the oldest transfer, whose requests must have been dropped; returns its end.
    std::optional<PeerEnd> give_up(std::uint64_t now) {
        issuing_ = outstanding_ = credit_ = 0;
        if (transfers_.empty()) return {};
        const Transfer& front = transfers_.front();
        const PeerEnd end{front.number, now, front.ended, kGivenUp, write_};
        transfers_.pop_front();
        return end;
    }

  private:
    struct Transfer {
        std::uint64_t number, begin, at, end, ended, ready;
        std::uint8_t* data;
        std::int32_t response;
        std::uint64_t address;
    };

    PeerQueue& queue_;
    bool write_;
    ClientOptions options_;
    std::deque<Transfer> transfers_;
    std::size_t issuing_ = 0;   // the first transfer with requests to issue
    std::uint64_t credit_ = 0;  // unused bytes of the link, times the interval
    std::uint64_t outstanding_ = 0, requests_ = 0;
};

class ClientLink {
  public:
    explicit ClientLink(const ClientOptions& options)
        : up_(dma_.host_writes, true, options), down_(dma_.host_reads, false, options) {}

    // Source of requests for the port of the window.
    PeerDma& dma() { return dma_; }

    void submit(std::uint64_t number, std::uint64_t address, std::uint8_t* data,
                std::uint64_t bytes, bool write, std::uint64_t now) {
        (write ? up_ : down_).submit(number, address, data, bytes, now);
    }

    // The cycle `now` is over.
    void pass(std::uint64_t now) {
        dma_.pass(now);
        up_.pass(now);
        down_.pass(now);
        while (const auto request = dma_.ended())
            if (const auto end = (request->write ? up_ : down_).answer(*request))
                (request->write ? ended_ : arriving_).push_back(*end);
        while (!arriving_.empty() && arriving_.front().cycle <= now) {
            ended_.push_back(arriving_.front());
            arriving_.pop_front();
        }
    }

    void give_up(std::uint64_t now) {
        dma_.give_up();
        while (dma_.ended()) {
        }
        for (ClientLane* lane : {&up_, &down_})
            while (const auto end = lane->give_up(now)) ended_.push_back(*end);
        ended_.insert(ended_.end(), arriving_.begin(), arriving_.end());
        arriving_.clear();
    }

    bool has_ended() const { return !ended_.empty(); }

    // The oldest end that was not yet returned.
    std::optional<PeerEnd> ended() {
        if (ended_.empty()) return {};
        const PeerEnd end = ended_.front();
        ended_.pop_front();
        return end;
    }

  private:
    PeerDma dma_{ClientLane::kRequest, ClientLane::kRequest, {1, 0, 0, 0}};
    ClientLane up_, down_;
    std::deque<PeerEnd> arriving_, ended_;
};

}  // namespace nearstep
