// The host's side of a memory BAR: requests of the link, as they come out of a PCIe endpoint on AXI4.
//
// A write is posted requests of at most `payload` bytes, a read requests of at most `request`, all
// ending where that divides the address, so that none crosses a page; a completion ends where
// `payload` divides the address, and so at the read completion boundary. The link counts in words of
// four bytes, whose first and last can be enabled in part. Each request is one burst. A read is not
// issued before every posted write was answered.
//
// Two DMA engines use the same port: that of a peer, the card's drive, and that of the host. Each
// engine has one ID for writes, and shares the tags for reads. Requests of the host's processor are
// issued first, then the drive's; requests of different sources are not ordered.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "models/axi/axi.hpp"
#include "models/peer_dma.hpp"

namespace nearstep {

struct BarLimits {
    std::uint64_t payload, request;  // powers of two
};

struct BarCounters {
    std::uint64_t write_tlps = 0, write_bytes = 0, read_tlps = 0;      // to the device
    std::uint64_t completion_tlps = 0, completion_bytes = 0;           // from it
};

struct BarFailure {
    std::int32_t response = kOkay;
    std::int32_t write = 0;
    std::uint64_t address = 0;
};

class BarHost {
  public:
    static constexpr std::uint64_t kWord = 4;
    static constexpr unsigned kTags = 16;  // reads outstanding: 8 KiB, what the endpoint has space for
    static constexpr std::size_t kPosted = 32;  // writes, as the endpoint has under way
    static constexpr unsigned kHost = 0, kPeer = 1, kDma = 2;  // IDs of writes

    // `peer`, if not null, must outlive this.
    BarHost(unsigned beat_bytes, BarLimits limits, PeerDma* peer = nullptr)
        : beat_(beat_bytes), limits_(limits), peer_(peer) {
        while ((1u << size_) < beat_bytes) ++size_;
        pins_.rready = pins_.bready = true;
    }

    void reset() {
        pins_ = {};
        pins_.rready = pins_.bready = true;
        write_at_ = write_end_ = read_at_ = read_end_ = 0;
        bursts_.clear();
        for (auto& each : unanswered_) each.clear();
        kept_.clear();
        tags_ = {};
        host_bursts_ = peer_tags_ = 0;
        beat_is_host_ = true;
        failure = {};
    }

    // Drops the rest of a transfer, whose buffer is not used any more: writes already issued
    // continue from a copy, and data of reads already issued are dropped.
    void abandon() {
        write_end_ = write_at_;
        read_end_ = read_at_;
        for (Burst& burst : bursts_) {
            if (burst.queue != nullptr) continue;
            kept_.emplace_back(burst.data, burst.data + (burst.end - burst.at));
            burst.data = kept_.back().data();
        }
        for (Read& read : tags_) read.dropped |= read.queue == nullptr;
    }

    // Begins a write; `data` must stay valid while `sending`.
    void write(std::uint64_t address, const std::uint8_t* data, std::uint64_t bytes) {
        write_base_ = write_at_ = address;
        write_end_ = address + bytes;
        source_ = data;
    }

    // Begins a read. Beats answered with an error leave `out` unchanged.
    void read(std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) {
        read_base_ = read_at_ = address;
        read_end_ = address + bytes;
        sink_ = out;
    }

    // Whether data of a write were not yet sent.
    bool sending() const {
        return write_at_ < write_end_ || host_bursts_ != 0 || (pins_.wvalid && beat_is_host_);
    }
    // Whether writes were not yet answered.
    bool posted() const { return !unanswered_[kHost].empty(); }
    // Whether a read was not yet answered.
    bool reading() const {
        return read_at_ < read_end_ ||
               std::any_of(tags_.begin(), tags_.end(),
                           [](const Read& read) { return read.used && read.queue == nullptr; });
    }
    // Whether a request of a DMA engine was not yet answered.
    bool serves_dma() const {
        return !unanswered_[kPeer].empty() || !unanswered_[kDma].empty() ||
               std::any_of(tags_.begin(), tags_.end(),
                           [](const Read& read) { return read.used && read.queue != nullptr; });
    }

    // Whether a read with this ID is outstanding.
    bool expects(unsigned id) const { return id < kTags && tags_[id].used; }
    // Whether a write with this ID is outstanding.
    bool expects_response(unsigned id) const { return id <= kDma && !unanswered_[id].empty(); }

    // Bit mask of the tags that the peer uses.
    std::uint32_t peer_tags() const { return peer_tags_; }

    const ManagerPins& pins() const { return pins_; }

    // The clock edge that ends a cycle in which the device drove `device`. True if a transfer of
    // the host's processor advanced.
    bool tick(const SubordinatePins& device) {
        bool moved = false;
        if (pins_.aw.valid && device.awready) {
            moved |= pins_.aw.id == kHost;
            pins_.aw = {};
        }
        if (pins_.ar.valid && device.arready) {
            moved |= tags_[pins_.ar.id].queue == nullptr;
            pins_.ar = {};
        }
        if (pins_.wvalid && device.wready) {
            moved |= beat_is_host_;
            pins_.wvalid = false;
        }
        if (device.bvalid) {
            moved |= device.bid == kHost;
            answer(device);
        }
        if (device.rvalid) {
            moved |= tags_[device.rid].queue == nullptr;
            take(device);
        }
        offer();
        return moved;
    }

    // Records a timeout of the processor's outstanding accesses.
    void time_out() {
        if (sending() || posted())
            fail(kTimedOut, true, posted() ? unanswered_[kHost].front().at : write_at_);
        else
            for (const Read& read : tags_)
                if (read.used && read.queue == nullptr) fail(kTimedOut, false, read.at);
    }

    // Counts a register access, which is one request.
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
    BarCounters peer_counters;  // of the peer's requests
    BarFailure failure;         // the processor's first since the last clear

  private:
    // `queue` and `number` are those of a DMA engine's transfer; the processor's have none.
    struct Burst {
        std::uint64_t at, end;  // bytes not yet sent
        const std::uint8_t* data;
        PeerQueue* queue;
        std::uint64_t number;
    };
    struct Posted {
        std::uint64_t at;
        PeerQueue* queue;
        std::uint64_t number;
    };
    struct Read {
        std::uint64_t at, end, beat;  // bytes of the request, and the next beat
        std::uint8_t* data;           // destination of the bytes from `at` on
        PeerQueue* queue;
        std::uint64_t number;
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
        if (!pins_.aw.valid) offer_write();
        if (!pins_.wvalid && !bursts_.empty()) offer_beat();
        if (!pins_.ar.valid) offer_read();
    }

    void offer_write() {
        if (write_at_ < write_end_ && unanswered_[kHost].size() < kPosted) {
            const std::uint64_t end = cut(write_at_, write_end_, limits_.payload);
            post(kHost, {write_at_, end, source_ + (write_at_ - write_base_), nullptr, 0});
            write_at_ = end;
            ++host_bursts_;
        } else if (peer_ != nullptr && !offer_write_of(kPeer, peer_->writes)) {
            offer_write_of(kDma, peer_->host_writes);
        }
    }

    bool offer_write_of(unsigned id, PeerQueue& queue) {
        if (unanswered_[id].size() >= kPosted) return false;
        const auto due = queue.due();
        if (!due) return false;
        post(id, {due->at, due->end, due->data, &queue, due->number});
        queue.issue(*due);
        return true;
    }

    void post(unsigned id, const Burst& data) {
        pins_.aw = burst(id, data.at, data.end);
        bursts_.push_back(data);
        unanswered_[id].push_back({data.at, data.queue, data.number});
        BarCounters& count = id == kPeer ? peer_counters : counters;
        ++count.write_tlps;
        count.write_bytes += kWord * words(data.at, data.end);
    }

    void offer_beat() {
        Burst& burst = bursts_.front();
        const std::uint64_t beat = down(burst.at);
        const std::uint64_t end = std::min(burst.end, beat + beat_);
        pins_.wvalid = true;
        pins_.wlast = end == burst.end;
        pins_.wstrb = 0;
        beat_is_host_ = burst.queue == nullptr;
        if (beat_is_host_ || burst.queue->wants(burst.number)) {
            for (std::uint64_t at = burst.at; at < end; ++at) pins_.wstrb |= 1ull << (at - beat);
            std::copy_n(burst.data, end - burst.at, pins_.wdata.begin() + (burst.at - beat));
        }  // else the transfer was dropped: the beat has no strobe
        burst.data += end - burst.at;
        burst.at = end;
        if (pins_.wlast) {
            host_bursts_ -= beat_is_host_;
            bursts_.pop_front();
        }
        if (bursts_.empty()) kept_.clear();
    }

    void offer_read() {
        const auto free = std::find_if(tags_.begin(), tags_.end(),
                                       [](const Read& read) { return !read.used; });
        if (free == tags_.end()) return;
        const unsigned id = unsigned(free - tags_.begin());
        if (read_at_ < read_end_ && !posted()) {
            const std::uint64_t end = cut(read_at_, read_end_, limits_.request);
            *free = {read_at_, end,   down(read_at_), sink_ + (read_at_ - read_base_), nullptr, 0,
                     true,     false, false};
            ++counters.read_tlps;
            read_at_ = end;
        } else if (peer_ == nullptr) {
            return;
        } else if (take_read_of(peer_->reads, *free)) {
            ++peer_counters.read_tlps;
            peer_tags_ |= 1u << id;
        } else if (take_read_of(peer_->host_reads, *free)) {
            ++counters.read_tlps;
        } else {
            return;
        }
        pins_.ar = burst(id, free->at, free->end);
    }

    bool take_read_of(PeerQueue& queue, Read& read) {
        const auto due = queue.due();
        if (!due) return false;
        read = {due->at, due->end, down(due->at), due->data, &queue, due->number,
                true,    false,    false};
        queue.issue(*due);
        return true;
    }

    void answer(const SubordinatePins& device) {
        const Posted posted = unanswered_[device.bid].front();
        unanswered_[device.bid].pop_front();
        if (device.bresp != kOkay) {
            if (posted.queue == nullptr)
                fail(device.bresp, true, posted.at);
            else
                posted.queue->fail(posted.number, device.bresp, posted.at);
        }
        if (posted.queue != nullptr) posted.queue->answer(posted.number, posted.at);
    }

    void take(const SubordinatePins& device) {
        Read& read = tags_[device.rid];
        const std::uint64_t at = std::max(read.at, read.beat);
        const std::uint64_t end = std::min(read.end, read.beat + beat_);
        if (read.queue != nullptr) read.dropped = !read.queue->wants(read.number);
        if (device.rresp != kOkay) {
            if (read.queue != nullptr)
                read.queue->fail(read.number, device.rresp, at);
            else if (!read.dropped)
                fail(device.rresp, false, at);
            read.failed = true;
        } else if (at < end && !read.dropped) {
            std::copy_n(device.rdata.begin() + (at - read.beat), end - at,
                        read.data + (at - read.at));
        }
        read.beat += beat_;
        if (!device.rlast) return;
        read.used = false;
        BarCounters& count = peer_tags_ >> device.rid & 1 ? peer_counters : counters;
        const std::uint64_t first = read.at / limits_.payload;
        if (read.failed) {
            ++count.completion_tlps;  // a completion without data
        } else {
            count.completion_tlps += (read.end - 1) / limits_.payload - first + 1;
            count.completion_bytes += kWord * words(read.at, read.end);
        }
        peer_tags_ &= ~(1u << device.rid);
        if (read.queue != nullptr) read.queue->answer(read.number, read.at);
    }

    // The end of the first request of those for [at, end).
    static std::uint64_t cut(std::uint64_t at, std::uint64_t end, std::uint64_t most) {
        return std::min(end, at / most * most + most);
    }

    unsigned beat_;
    std::uint8_t size_ = 0;
    BarLimits limits_;
    PeerDma* peer_;
    ManagerPins pins_;
    const std::uint8_t* source_ = nullptr;
    std::uint8_t* sink_ = nullptr;
    std::uint64_t write_base_ = 0, write_at_ = 0, write_end_ = 0;
    std::uint64_t read_base_ = 0, read_at_ = 0, read_end_ = 0;
    std::deque<Burst> bursts_;
    std::deque<std::vector<std::uint8_t>> kept_;  // data of bursts whose write was abandoned
    std::array<std::deque<Posted>, 3> unanswered_;  // posted writes by ID, oldest first
    std::array<Read, kTags> tags_{};
    std::size_t host_bursts_ = 0;    // of `bursts_`
    bool beat_is_host_ = true;       // of the beat on W
    std::uint32_t peer_tags_ = 0;
};

}  // namespace nearstep
