// A host, and the drive on a card's switch, which send packets to a PCIe block in front of the
// card; `BarHost` makes the same accesses at the port of a memory BAR.
//
// Accesses are cut as in `BarHost`. Requests wait only where PCIe makes them: reads are sent behind
// writes that are not done, since the card keeps the order. A register is a dword of BAR 0. The
// write of a register is followed by a read without a byte (a flush), whose completion ends the
// write. `counters` exclude these reads and the requests that set up interrupts.
//
// Posted requests have no answer, so errors of memory are read at the memory's port: the card has
// one burst for each posted request, in order. Any other burst is a fault.
//
// Requests of others are packets of any contents (`other`); their completions are kept.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "models/axi/axi.hpp"
#include "models/bar_host.hpp"
#include "models/pcie/block.hpp"
#include "models/peer_dma.hpp"

namespace nearstep {

struct PcieShape {
    std::uint64_t memory_bytes;  // that the card has
    std::uint64_t bar_bytes;     // of the memory BAR, a power of two
    std::uint32_t beat_bytes;
    std::uint32_t register_bytes;  // of the register BAR
    std::uint32_t reorder, stall;
    std::uint64_t seed;
};

struct PcieCounters {
    std::uint64_t passed = 0, held = 0, waited = 0, messages = 0, failed_messages = 0;
    std::uint64_t flushes = 0;        // reads without a byte
    std::uint64_t malformed = 0;      // packets of others that the block dropped
    std::uint64_t unexpected = 0;     // completions of no request
    std::uint64_t configuration = 0;  // configuration requests, not for the design
    std::uint64_t unclaimed = 0;      // requests of no BAR, and poisoned ones with an answer
};

// The host's bursts at the port of the memory in a cycle.
struct HostBursts {
    bool aw = false, ar = false, b = false;
    std::uint64_t aw_address = 0, ar_address = 0;
    unsigned aw_beats = 0, ar_beats = 0, response = kOkay;
};

class PcieHost {
  public:
    static constexpr std::uint64_t kWord = 4;
    static constexpr unsigned kTags = 32;
    static constexpr unsigned kRegisterBar = 0, kMemoryBar = 2;
    static constexpr std::uint64_t kRegisterBase = 0xE000'0000, kMemoryBase = 1ull << 40;
    static constexpr std::uint16_t kRequesters[] = {0x0000, 0x0200, 0x0008};  // by origin
    static constexpr std::uint16_t kFirstOther = 0x0300;  // requester of others, from here on
    static constexpr std::int32_t kAbortedBy = 8;  // plus a completion's status: its response
    static constexpr std::uint32_t kMessageAddress = 0xFEE0'0000, kMessageData = 0x4E53;

    PcieHost(BarLimits limits, const PcieShape& shape, PeerDma* peer)
        : limits_(limits),
          shape_(shape),
          peer_(peer),
          block_(shape.reorder != 0, shape.stall, shape.seed, unsigned(limits.payload)) {}

    void reset() {
        block_.reset();
        write_at_ = write_end_ = read_at_ = read_end_ = 0;
        tags_ = {};
        accesses_.clear();
        others_.clear();
        awaited_.clear();
        aw_due_.clear();
        b_due_.clear();
        ar_due_.clear();
        unsent_ = unanswered_ = dma_writes_ = failed_ = 0;
        others_in_block_ = others_posted_ = 0;
        failure = {};
    }

    // As in `BarHost`.
    void abandon() {
        write_end_ = write_at_;
        read_end_ = read_at_;
        for (Read& read : tags_) read.dropped |= read.queue == nullptr;
    }
    void write(std::uint64_t address, const std::uint8_t* data, std::uint64_t bytes) {
        write_base_ = write_at_ = address;
        write_end_ = address + bytes;
        source_ = data;
    }
    void read(std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) {
        read_base_ = read_at_ = address;
        read_end_ = address + bytes;
        sink_ = out;
    }
    bool sending() const { return write_at_ < write_end_ || unsent_ != 0; }
    bool posted() const { return unanswered_ != 0; }
    bool reading() const {
        return read_at_ < read_end_ ||
               std::any_of(tags_.begin(), tags_.end(), [](const Read& read) {
                   return read.used && read.queue == nullptr && read.kind == Kind::memory;
               });
    }
    bool serves_dma() const {
        return dma_writes_ != 0 || std::any_of(tags_.begin(), tags_.end(), [](const Read& read) {
                   return read.used && read.queue != nullptr;
               });
    }
    void time_out() {
        if (sending() || posted()) {
            const Due* due = oldest();
            fail(kTimedOut, true, due != nullptr ? due->at : write_at_);
        } else {
            for (const Read& read : tags_)
                if (read.used && read.queue == nullptr) fail(kTimedOut, false, read.at);
        }
    }

    // Accesses of BAR 0, behind all that was sent before; each is over when nothing is `accessing`.
    void read_register(std::uint64_t address) {
        ++access_;
        accesses_.push_back(access(TlpKind::memory_read, address, 0xF));
        answer = {};
    }
    void write_register(std::uint64_t address, std::uint32_t value) {
        accesses_.push_back(access(TlpKind::memory_write, address, 0xF));
        accesses_.back().tlp.payload = {value};
        flush();
    }
    // Completed after every earlier posted request.
    void flush() {
        ++access_;
        accesses_.push_back(access(TlpKind::memory_read, 0, 0));
        ++flushes_;
        answer = {};
    }
    bool accessing() const {
        return !accesses_.empty() || std::any_of(tags_.begin(), tags_.end(), [](const Read& read) {
                   return read.used && read.kind == Kind::access;
               });
    }
    struct Answer {
        std::uint32_t value = 0, status = 0;
    } answer;

    // Number of writes, of any source, that memory answered with an error since the reset.
    std::uint64_t failed_writes() const { return failed_; }

    // A packet of another device, as on the link; see tlp.hpp.
    void other(const std::uint32_t* words, std::size_t count) {
        auto tlp = decode_tlp(words, count, unsigned(limits_.payload));
        if (!tlp) {
            ++counted_.malformed;
        } else if (tlp->kind == TlpKind::completion) {
            ++counted_.unexpected;
        } else if (tlp->kind == TlpKind::configuration) {
            ++counted_.configuration;
        } else {
            Request request;
            request.origin = Origin::other;
            request.tlp = std::move(*tlp);
            const bool poisoned = request.tlp.poisoned && !request.tlp.payload.empty();
            request.discontinue = poisoned;
            const bool found = request.tlp.kind == TlpKind::message || place(request);
            if (!found || (poisoned && !request.tlp.posted())) {
                ++counted_.unclaimed;
                if (!request.tlp.posted()) refuse(request.tlp);
            } else {
                if (!request.tlp.posted()) ++awaited_[key(request.tlp)];
                others_.push_back(std::move(request));
            }
        }
    }
    // Whether packets of others are outstanding.
    bool serves_others() const {
        return !others_.empty() || !awaited_.empty() || others_in_block_ != 0 || others_posted_ != 0;
    }
    // Completions to others: descriptor, and payload or copy of the request.
    std::deque<std::vector<std::uint32_t>> completions;

    PcieBlock& block() { return block_; }
    bool next_write_is_peers() const {
        return !aw_due_.empty() && aw_due_.front().origin == Origin::drive;
    }
    bool next_read_is_peers() const {
        return !ar_due_.empty() && ar_due_.front().origin == Origin::drive;
    }

    // The clock edge that ends a cycle with these pins. True if the processor's requests advanced.
    bool tick(bool cq_ready, unsigned np_req, const CcPins& cc, const HostBursts& bursts,
              Fault& fault, std::uint64_t now) {
        bool moved = false;
        if (auto done = block_.completion(cc, fault, now, block_.cc_ready()))
            moved |= complete(*done, fault, now);
        moved |= follow(bursts, fault, now);
        if (auto taken = block_.tick(cq_ready, np_req)) moved |= sent(*taken);
        offer();
        return moved;
    }

    BarCounters counters;
    BarCounters peer_counters;
    BarFailure failure;

    PcieCounters shown() const {
        PcieCounters all = counted_;
        const BlockCounters& block = block_.counters;
        all.passed = block.passed;
        all.held = block.held;
        all.waited = block.waited;
        all.messages = block.messages;
        all.failed_messages = block.failed_messages;
        all.flushes = flushes_;
        return all;
    }

  private:
    enum class Kind : std::uint8_t { memory, access };

    struct Read {
        std::uint64_t at, end;  // bytes not yet received
        std::uint8_t* data;     // their destination
        PeerQueue* queue;
        std::uint64_t number, begin;
        Origin origin;
        Kind kind;
        bool used, dropped;
    };
    // A burst of the card that answers a request.
    struct Due {
        std::uint64_t address;
        unsigned beats;
        Origin origin;
        PeerQueue* queue;
        std::uint64_t number, at;
    };

    void fail(std::int32_t response, bool write, std::uint64_t address) {
        if (failure.response == kOkay) failure = {response, write, address};
    }

    static std::uint32_t key(const Tlp& tlp) { return std::uint32_t(tlp.requester) << 8 | tlp.tag; }

    const Due* oldest() const {
        for (const auto* dues : {&b_due_, &aw_due_})
            for (const Due& due : *dues)
                if (due.origin == Origin::processor) return &due;
        return nullptr;
    }

    // Finds the BAR of a request's address.
    bool place(Request& request) const {
        const auto inside = [&](std::uint64_t base, std::uint64_t bytes) {
            request.offset = request.tlp.address - base;
            return request.tlp.address >= base && request.offset < bytes;
        };
        if (inside(kRegisterBase, shape_.register_bytes)) {
            request.bar = kRegisterBar;
            request.aperture = log2(shape_.register_bytes);
            return true;
        }
        request.bar = kMemoryBar;
        request.aperture = log2(shape_.bar_bytes);
        return inside(kMemoryBase, shape_.bar_bytes);
    }

    static unsigned log2(std::uint64_t value) {
        unsigned bits = 0;
        while ((1ull << bits) < value) ++bits;
        return bits;
    }

    Request request(TlpKind kind, Origin origin, std::uint64_t address) const {
        Request made;
        made.origin = origin;
        made.tlp.kind = kind;
        made.tlp.requester = kRequesters[unsigned(origin)];
        made.tlp.address = address;
        place(made);
        return made;
    }

    Request access(TlpKind kind, std::uint64_t address, std::uint8_t enables) const {
        Request made = request(kind, Origin::processor, kRegisterBase + address);
        made.tlp.first_be = enables;
        return made;
    }

    // A request for bytes of memory.
    Request bytes(TlpKind kind, Origin origin, std::uint64_t at, std::uint64_t end) const {
        const std::uint64_t first = at / kWord * kWord;
        Request made = request(kind, origin, kMemoryBase + first);
        const unsigned dwords = unsigned((end + kWord - 1 - first) / kWord);
        const unsigned head = 0xFu << (at - first) & 0xF;
        const unsigned tail = 0xFu >> (first + dwords * kWord - end);
        made.tlp.dwords = dwords;
        made.tlp.first_be = std::uint8_t(dwords == 1 ? head & tail : head);
        made.tlp.last_be = std::uint8_t(dwords == 1 ? 0 : tail);
        return made;
    }

    void offer() {
        if (!others_.empty()) {
            if (admit(others_.front())) {
                ++others_in_block_;
                block_.receive(std::move(others_.front()));
                others_.pop_front();
            }
            return;
        }
        if (write_at_ < write_end_) {
            const std::uint64_t end = cut(write_at_, write_end_, limits_.payload);
            Request made = bytes(TlpKind::memory_write, Origin::processor, write_at_, end);
            fill(made.tlp, write_at_, end, source_ + (write_at_ - write_base_));
            if (!admit(made)) return;
            write_at_ = end;
            ++unanswered_;
            send(std::move(made));
            return;
        }
        if (!accesses_.empty()) {
            Request& next = accesses_.front();
            if (!admit(next)) return;
            if (!next.tlp.posted()) {
                Read* read = free_tag(next.tlp);
                if (read == nullptr) return;
                *read = {next.offset, next.offset + kWord, nullptr, nullptr, access_, next.offset,
                         Origin::processor, Kind::access, true, false};
                if (next.tlp.first_be != 0) ++counters.read_tlps;
            } else {
                ++counters.write_tlps;
                counters.write_bytes += kWord;
                ++unsent_;
            }
            block_.receive(std::move(next));
            accesses_.pop_front();
            return;
        }
        if (read_at_ < read_end_) {
            const std::uint64_t end = cut(read_at_, read_end_, limits_.request);
            if (ask(Origin::processor, read_at_, end, sink_ + (read_at_ - read_base_), nullptr, 0))
                read_at_ = end;
            return;
        }
        if (peer_ == nullptr) return;
        turn_ = !turn_;  // the directions alternate
        if (turn_ ? offer_writes() || offer_reads() : offer_reads() || offer_writes()) return;
    }

    bool offer_writes() {
        return offer_write_of(Origin::drive, peer_->writes) ||
               offer_write_of(Origin::dma, peer_->host_writes);
    }
    bool offer_reads() {
        return offer_read_of(Origin::drive, peer_->reads) ||
               offer_read_of(Origin::dma, peer_->host_reads);
    }

    bool offer_write_of(Origin origin, PeerQueue& queue) {
        const auto due = queue.due();
        if (!due) return false;
        Request made = bytes(TlpKind::memory_write, origin, due->at, due->end);
        fill(made.tlp, due->at, due->end, due->data);
        if (!admit(made)) return false;
        made.queue = &queue;
        made.number = due->number;
        queue.issue(*due);
        ++dma_writes_;
        send(std::move(made));
        return true;
    }

    bool offer_read_of(Origin origin, PeerQueue& queue) {
        const auto due = queue.due();
        if (!due || !ask(origin, due->at, due->end, due->data, &queue, due->number)) return false;
        queue.issue(*due);
        return true;
    }

    bool ask(Origin origin, std::uint64_t at, std::uint64_t end, std::uint8_t* data,
             PeerQueue* queue, std::uint64_t number) {
        Request made = bytes(TlpKind::memory_read, origin, at, end);
        if (!admit(made)) return false;
        Read* read = free_tag(made.tlp);
        if (read == nullptr) return false;
        *read = {at, end, data, queue, number, at, origin, Kind::memory, true, false};
        ++count_of(origin).read_tlps;
        block_.receive(std::move(made));
        return true;
    }

    Read* free_tag(Tlp& tlp) {
        const auto free = std::find_if(tags_.begin(), tags_.end(),
                                       [](const Read& read) { return !read.used; });
        if (free == tags_.end()) return nullptr;
        tlp.tag = std::uint8_t(free - tags_.begin());
        return &*free;
    }

    bool admit(const Request& made) {
        if (block_.room(made.tlp)) return true;
        block_.wait_for_room();
        return false;
    }

    void send(Request made) {
        BarCounters& count = count_of(made.origin);
        ++count.write_tlps;
        count.write_bytes += kWord * made.tlp.dwords;
        if (made.origin == Origin::processor) ++unsent_;
        block_.receive(std::move(made));
    }

    BarCounters& count_of(Origin origin) {
        return origin == Origin::drive ? peer_counters : counters;
    }

    static void fill(Tlp& tlp, std::uint64_t at, std::uint64_t end, const std::uint8_t* data) {
        tlp.payload.assign(tlp.dwords, 0);
        std::memcpy(reinterpret_cast<std::uint8_t*>(tlp.payload.data()) + at % kWord, data, end - at);
    }

    // The card has taken a request: notes the bursts due at its memory.
    bool sent(const Request& request) {
        const Tlp& tlp = request.tlp;
        if (request.origin == Origin::other) --others_in_block_;
        if (request.origin == Origin::processor && tlp.posted()) --unsent_;
        const bool memory = tlp.kind == TlpKind::memory_read || tlp.kind == TlpKind::memory_write;
        const std::uint64_t bytes = std::uint64_t(tlp.dwords) * kWord;
        const bool carried = memory && request.bar == kMemoryBar && !request.discontinue &&
                             request.offset + bytes <= shape_.memory_bytes &&
                             tlp.address % kTlpPage + bytes <= kTlpPage && !forbidden_enables(tlp);
        if (carried && tlp.posted()) {
            aw_due_.push_back(due(request, request.offset, request.offset + bytes));
            if (request.origin == Origin::other) ++others_posted_;
        }
        if (carried && !tlp.posted())
            for (std::uint64_t at = request.offset; at < request.offset + bytes;) {
                const std::uint64_t end = cut(at, request.offset + bytes, limits_.payload);
                ar_due_.push_back(due(request, at, end));
                at = end;
            }
        return request.origin == Origin::processor;
    }

    Due due(const Request& request, std::uint64_t at, std::uint64_t end) const {
        const std::uint64_t beat = shape_.beat_bytes, first = at / beat * beat;
        std::uint64_t begin = at;  // the first enabled byte, which identifies a request in a queue
        for (unsigned byte = 0; byte < 4 && request.tlp.first_be >> byte != 0 &&
                                !(request.tlp.first_be >> byte & 1); ++byte)
            ++begin;
        return {first, unsigned((end - first + beat - 1) / beat), request.origin, request.queue,
                request.number, begin};
    }

    bool follow(const HostBursts& bursts, Fault& fault, std::uint64_t now) {
        bool moved = false;
        if (bursts.aw) {
            check("AW", aw_due_, bursts.aw_address, bursts.aw_beats, fault, now);
            if (!aw_due_.empty()) {
                moved |= aw_due_.front().origin == Origin::processor;
                b_due_.push_back(aw_due_.front());
                aw_due_.pop_front();
            }
        }
        if (bursts.ar) {
            check("AR", ar_due_, bursts.ar_address, bursts.ar_beats, fault, now);
            if (!ar_due_.empty()) {
                moved |= ar_due_.front().origin == Origin::processor;
                ar_due_.pop_front();
            }
        }
        if (!bursts.b) return moved;
        if (b_due_.empty()) {
            fault.protocol("B", "an answer belongs to a request", now, "none waits");
            return moved;
        }
        const Due due = b_due_.front();
        b_due_.pop_front();
        failed_ += bursts.response != kOkay;
        if (due.origin == Origin::other) {
            --others_posted_;
        } else if (due.queue == nullptr) {
            --unanswered_;
            if (bursts.response != kOkay) fail(std::int32_t(bursts.response), true, due.at);
            moved = true;
        } else {
            --dma_writes_;
            if (bursts.response != kOkay)
                due.queue->fail(due.number, std::int32_t(bursts.response), due.at);
            due.queue->answer(due.number, due.at);
        }
        return moved;
    }

    static void check(const char* channel, const std::deque<Due>& dues, std::uint64_t address,
                      unsigned beats, Fault& fault, std::uint64_t now) {
        if (dues.empty())
            fault.protocol(channel, "a burst belongs to a request", now, "%u beats at %#llx", beats,
                           (unsigned long long)address);
        else if (dues.front().address != address || dues.front().beats != beats)
            fault.protocol(channel, "a burst is what a request asks for", now,
                           "%u beats at %#llx, expected %u at %#llx", beats,
                           (unsigned long long)address, dues.front().beats,
                           (unsigned long long)dues.front().address);
    }

    bool complete(const Completion& done, Fault& fault, std::uint64_t now) {
        if (done.requester >= kFirstOther) {
            const auto found = awaited_.find(std::uint32_t(done.requester) << 8 | done.tag);
            if (found == awaited_.end()) {
                stray(done, fault, now);
            } else {
                if (done.ends() && --found->second == 0) awaited_.erase(found);
                completions.push_back(done.words);
            }
            return false;
        }
        if (done.tag >= kTags || !tags_[done.tag].used ||
            done.requester != kRequesters[unsigned(tags_[done.tag].origin)]) {
            stray(done, fault, now);
            return false;
        }
        Read& read = tags_[done.tag];
        BarCounters& count = count_of(read.origin);
        const bool access = read.kind == Kind::access;
        if (done.status != 0) {
            refused(read, done, count);
            return read.queue == nullptr;
        }
        const std::uint64_t first = read.at / kWord * kWord;
        const std::uint64_t end = std::min(read.end, first + done.dwords * kWord);
        const bool empty = access && asks_nothing(done);
        if (!empty && (done.byte_count != read.end - read.at || done.lower_address != read.at % 128))
            fault.protocol("CC", "a completion is the next one of its request", now,
                           "%u bytes at %#x, expected %llu", done.byte_count, done.lower_address,
                           (unsigned long long)(read.end - read.at));
        if (!empty) {
            ++count.completion_tlps;
            count.completion_bytes += kWord * done.dwords;
        }
        if (access) {
            if (!empty && read.number == access_) answer = {done.payload()[0], 0};
            read.used = false;
            return true;
        }
        if (read.queue != nullptr) read.dropped = !read.queue->wants(read.number);
        if (!read.dropped)
            std::memcpy(read.data,
                        reinterpret_cast<const std::uint8_t*>(done.payload()) + read.at % kWord,
                        end - read.at);
        read.data += end - read.at;
        read.at = end;
        if (read.at == read.end) finish(read);
        return read.queue == nullptr;
    }

    // The completion of a read without a byte has one dword and a byte count of 1.
    static bool asks_nothing(const Completion& done) { return done.byte_count == 1; }

    void refused(Read& read, const Completion& done, BarCounters& count) {
        ++count.completion_tlps;
        const std::int32_t response = kAbortedBy + std::int32_t(done.status);
        if (read.kind == Kind::access) {
            if (read.number == access_) answer = {0, done.status};
        } else if (read.queue != nullptr) {
            read.queue->fail(read.number, response, read.at);
        } else if (!read.dropped) {
            fail(response, false, read.at);
        }
        finish(read);
    }

    void finish(Read& read) {
        read.used = false;
        if (read.queue != nullptr) read.queue->answer(read.number, read.begin);
    }

    static void stray(const Completion& done, Fault& fault, std::uint64_t now) {
        fault.protocol("CC", "a completion belongs to a request", now, "requester %#x, tag %u",
                       done.requester, done.tag);
    }

    // The block itself answers a request of others that no BAR claims, as unsupported.
    void refuse(const Tlp& tlp) {
        completions.push_back({0, 1u << 11 | std::uint32_t(tlp.requester) << 16,
                               tlp.tag | std::uint32_t(tlp.traffic_class) << 25 |
                                   std::uint32_t(tlp.attributes) << 28});
    }

    static std::uint64_t cut(std::uint64_t at, std::uint64_t end, std::uint64_t most) {
        return std::min(end, at / most * most + most);
    }

    BarLimits limits_;
    PcieShape shape_;
    PeerDma* peer_;
    PcieBlock block_;
    PcieCounters counted_;
    std::uint64_t flushes_ = 0;
    std::uint64_t access_ = 0;  // number of the last register access; earlier ones were dropped
    const std::uint8_t* source_ = nullptr;
    std::uint8_t* sink_ = nullptr;
    std::uint64_t write_base_ = 0, write_at_ = 0, write_end_ = 0;
    std::uint64_t read_base_ = 0, read_at_ = 0, read_end_ = 0;
    std::array<Read, kTags> tags_{};
    std::deque<Request> accesses_, others_;
    std::map<std::uint32_t, unsigned> awaited_;  // requests of others, by requester and tag
    std::deque<Due> aw_due_, b_due_, ar_due_;
    std::uint64_t unsent_ = 0;        // of the processor's posted requests
    std::uint64_t unanswered_ = 0;    // of its writes of memory
    std::uint64_t dma_writes_ = 0;    // that are under way
    std::uint64_t others_in_block_ = 0, others_posted_ = 0;
    std::uint64_t failed_ = 0;
    bool turn_ = false;
};

}  // namespace nearstep
