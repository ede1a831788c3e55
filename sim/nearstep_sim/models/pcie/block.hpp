// The completer side of the UltraScale+ PCIe block (PG213), between a link and a design: receive
// buffers with flow-control credits, the stream of requests, credits for those that are not posted,
// and the stream of completions, checked against the block's rules. Streams have 128 bits.
//
// The block hands over the oldest buffered request that the rules allow. A posted request may pass
// non-posted ones, and does where these have no credits; no request passes a posted one.
// With `reorder` it chooses at random among all that the ordering rules allow (PCIe Base
// Specification, table 2-40). With stalls, each stream waits in random cycles.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "models/pcie/tlp.hpp"
#include "models/peer_dma.hpp"
#include "models/random.hpp"
#include "verilate/fault.hpp"

namespace nearstep {

constexpr unsigned kCqDwords = 4;
constexpr unsigned kPostedHeaders = 32, kPostedData = 1024, kNonPostedHeaders = 32;  // credits
constexpr unsigned kCreditDwords = 4;
constexpr unsigned kMostRequested = 32;  // credits of pcie_cq_np_req that the block counts
constexpr unsigned kCompletionDwords = 3, kRequestCopyDwords = 5;
constexpr unsigned kReadBoundary = 128;  // of an endpoint's completions

// Source of a request.
enum class Origin : std::uint8_t { processor, drive, dma, other };

struct Request {
    Tlp tlp;
    Origin origin = Origin::processor;
    PeerQueue* queue = nullptr;  // of a DMA engine's transfer, and its number
    std::uint64_t number = 0;
    unsigned bar = 0, aperture = 0;
    std::uint64_t offset = 0;   // in the BAR
    bool discontinue = false;   // its payload is damaged
    std::uint64_t sequence = 0;

    // As the block gives it to the design (PG213, completer request descriptors).
    std::array<std::uint32_t, 4> descriptor() const {
        static constexpr std::uint8_t kTypes[] = {0, 1, 2, 3, 4, 5, 6, 7, 12};
        const std::uint32_t kind = kTypes[unsigned(tlp.kind)];
        return {std::uint32_t(tlp.address) | tlp.address_type, std::uint32_t(tlp.address >> 32),
                tlp.dwords | kind << 11 | std::uint32_t(tlp.requester) << 16,
                tlp.tag | bar << 16 | aperture << 19 | std::uint32_t(tlp.traffic_class) << 25 |
                    std::uint32_t(tlp.attributes) << 28};
    }

    std::uint32_t sideband() const { return tlp.first_be | std::uint32_t(tlp.last_be) << 4; }
};

struct CqPins {
    bool valid = false, last = false;
    std::array<std::uint32_t, kCqDwords> data{};
    std::uint8_t keep = 0;
    std::array<std::uint32_t, 3> user{};
};

struct CcPins {
    bool valid = false, last = false;
    std::array<std::uint32_t, kCqDwords> data{};
    std::uint8_t keep = 0;
    std::uint64_t user = 0;

    bool operator==(const CcPins&) const = default;
};

struct Completion {
    unsigned lower_address, byte_count, dwords, status;
    std::uint16_t requester;
    std::uint8_t tag, traffic_class, attributes;
    std::vector<std::uint32_t> words;  // descriptor, and payload or the copy of the request

    explicit Completion(std::vector<std::uint32_t> packet)
        : lower_address(packet[0] & 0x7F),
          byte_count(packet[0] >> 16 & 0x1FFF),
          dwords(packet[1] & 0x7FF),
          status(packet[1] >> 11 & 7),
          requester(std::uint16_t(packet[1] >> 16)),
          tag(packet[2] & 0xFF),
          traffic_class(packet[2] >> 25 & 7),
          attributes(packet[2] >> 28 & 7),
          words(std::move(packet)) {}

    const std::uint32_t* payload() const { return words.data() + kCompletionDwords; }
    // Whether this is the last completion of its request.
    bool ends() const { return status != 0 || byte_count <= 4 * dwords - (lower_address & 3); }
};

struct BlockCounters {
    std::uint64_t passed = 0;   // posted requests that passed others
    std::uint64_t held = 0;     // cycles in which a request waited for a credit of the design
    std::uint64_t waited = 0;   // cycles in which one waited for a credit of the link
    std::uint64_t messages = 0, failed_messages = 0;  // of MSI-X
};

class PcieBlock {
  public:
    PcieBlock(bool reorder, std::uint32_t stall, std::uint64_t seed, unsigned max_payload)
        : reorder_(reorder), stall_(stall), random_(seed), max_payload_(max_payload) {}

    void reset() {
        posted_.clear();
        others_.clear();
        current_.reset();
        cq_ = {};
        packet_.clear();
        shown_.reset();
        headers_ = data_ = credits_ = 0;
        cc_ready_ = true;
        msix_ = false;
        msix_sent = msix_failed = false;
    }

    // Whether the link has credits for a request.
    bool room(const Tlp& tlp) const {
        if (!tlp.posted()) return others_.size() < kNonPostedHeaders;
        return headers_ < kPostedHeaders && data_ + units(tlp) <= kPostedData;
    }
    void receive(Request request) {
        request.sequence = sequence_++;
        if (request.tlp.posted()) {
            ++headers_;
            data_ += units(request.tlp);
            posted_.push_back(std::move(request));
        } else {
            others_.push_back(std::move(request));
        }
    }
    void wait_for_room() { ++counters.waited; }
    bool empty() const { return posted_.empty() && others_.empty() && !current_; }

    const CqPins& cq() const { return cq_; }
    bool cc_ready() const { return cc_ready_; }

    // The clock edge that ends a cycle with these pins of the design. Returns a request whose last
    // beat was taken.
    std::optional<Request> tick(bool cq_ready, unsigned np_req) {
        std::optional<Request> taken;
        if (np_req != 0) credits_ = std::min(credits_ + (np_req == 1 ? 1 : 2), kMostRequested);
        if (cq_.valid && cq_ready) {
            cq_.valid = false;
            if (cq_.last) {
                if (current_->tlp.posted()) {
                    --headers_;
                    data_ -= units(current_->tlp);
                }
                taken = std::move(current_);
                current_.reset();
            }
        }
        if (!current_) choose();
        if (current_ && !cq_.valid && !random_.chance(stall_)) show();
        cc_ready_ = !random_.chance(stall_);
        return taken;
    }

    // Takes the completion beat of the cycle. Returns a packet with its last beat.
    std::optional<Completion> completion(const CcPins& cc, Fault& fault, std::uint64_t now,
                                         bool was_ready) {
        if (!cc.valid) {
            if (!packet_.empty() || shown_)
                fault.protocol("CC", "TVALID holds inside a packet", now, "after %zu dwords",
                               packet_.size());
            return {};
        }
        if (shown_ && !(*shown_ == cc))
            fault.protocol("CC", "a beat holds until TREADY", now, "after %zu dwords",
                           packet_.size());
        if (!was_ready) {
            shown_ = cc;
            return {};
        }
        shown_.reset();
        unsigned count = 0;
        while (count < kCqDwords && cc.keep >> count & 1) ++count;
        if (count == 0 || cc.keep >> count || (!cc.last && count < kCqDwords))
            fault.protocol("CC", "TKEEP has no hole", now, "it is %#x", cc.keep);
        if (cc.user != 0)
            fault.protocol("CC", "nothing is discontinued", now, "TUSER is %#llx",
                           (unsigned long long)cc.user);
        packet_.insert(packet_.end(), cc.data.begin(), cc.data.begin() + count);
        if (!cc.last) return {};
        if (packet_.size() < kCompletionDwords) {
            fault.protocol("CC", "a packet has a descriptor", now, "%zu dwords", packet_.size());
            packet_.clear();
            return {};
        }
        Completion done(std::exchange(packet_, {}));
        check(done, fault, now);
        return done;
    }

    // MSI-X: takes the design's request for a message. In the next cycle `msix_sent` is true or, at
    // random with stalls, `msix_failed`.
    bool message(bool request) {
        msix_sent = msix_failed = false;
        if (std::exchange(msix_, request)) {
            msix_failed = random_.chance(stall_);
            msix_sent = !msix_failed;
            ++(msix_sent ? counters.messages : counters.failed_messages);
        }
        return msix_sent;
    }

    bool msix_sent = false, msix_failed = false;
    BlockCounters counters;

  private:
    static unsigned units(const Tlp& tlp) {
        return unsigned(tlp.payload.size() + kCreditDwords - 1) / kCreditDwords;
    }

    void choose() {
        const bool waits = !others_.empty();
        const std::uint64_t oldest = posted_.empty() ? ~0ull : posted_.front().sequence;
        // Number of non-posted requests older than every posted one.
        std::size_t free = 0;
        while (free < others_.size() && others_[free].sequence < oldest) ++free;
        if (waits && free != 0 && credits_ == 0) ++counters.held;
        const bool may = free != 0 && credits_ != 0;
        bool pass = posted_.empty() ? false : !may;
        if (reorder_ && may && !posted_.empty()) pass = random_.chance(1u << 15);
        if (pass) {
            if (free != 0) ++counters.passed;
            current_ = std::move(posted_.front());
            posted_.pop_front();
        } else if (may) {
            const std::size_t at = reorder_ ? std::size_t(random_.next() % free) : 0;
            current_ = std::move(others_[at]);
            others_.erase(others_.begin() + std::ptrdiff_t(at));
            --credits_;
        }
        if (current_) shown_dwords_ = 0;
    }

    void show() {
        const Request& request = *current_;
        const auto& payload = request.tlp.payload;
        cq_ = {};
        cq_.valid = true;
        std::uint32_t enables = 0;
        if (shown_dwords_ == 0) {
            cq_.data = request.descriptor();
            cq_.keep = 0xF;
            cq_.user[1] = 1u << (40 - 32);  // first beat
        } else {
            for (unsigned lane = 0; lane < kCqDwords; ++lane) {
                const std::size_t index = shown_dwords_ - kCqDwords + lane;
                if (index >= payload.size()) break;
                cq_.data[lane] = payload[index];
                cq_.keep |= 1u << lane;
                enables |= request.tlp.byte_enables(unsigned(index)) << 4 * lane;
            }
        }
        shown_dwords_ += kCqDwords;
        cq_.last = shown_dwords_ >= kCqDwords + payload.size();
        cq_.user[0] = request.sideband() | enables << 8;
        cq_.user[1] |= enables >> 24;
        if (cq_.last && request.discontinue) cq_.user[1] |= 1u << (41 - 32);
    }

    void check(const Completion& done, Fault& fault, std::uint64_t now) const {
        const std::size_t size = done.words.size();
        const std::size_t expected =
            kCompletionDwords + (done.status == 0 ? done.dwords : kRequestCopyDwords);
        if (size != expected)
            fault.protocol("CC", "a packet is as long as it says", now, "%zu dwords, expected %zu",
                           size, expected);
        if (done.status != 0) {
            if (done.dwords != 0)
                fault.protocol("CC", "a refusal has no payload", now, "%u dwords", done.dwords);
            return;
        }
        if (4 * done.dwords > max_payload_)
            fault.protocol("CC", "payload is at most the largest", now, "%u dwords", done.dwords);
        const unsigned end = (done.lower_address & ~3u) + 4 * done.dwords;
        if (!done.ends() && end % kReadBoundary != 0)
            fault.protocol("CC", "completions are cut at the read boundary", now, "at %#x", end);
    }

    bool reorder_;
    std::uint32_t stall_;
    Random random_;
    unsigned max_payload_;
    std::deque<Request> posted_, others_;
    std::optional<Request> current_;  // on CQ
    std::size_t shown_dwords_ = 0;    // of it, descriptor included
    CqPins cq_;
    std::vector<std::uint32_t> packet_;
    std::optional<CcPins> shown_;  // the beat that was not taken
    std::uint64_t sequence_ = 0;
    unsigned headers_ = 0, data_ = 0, credits_ = 0;
    bool cc_ready_ = true;
    bool msix_ = false;
};

}  // namespace nearstep
