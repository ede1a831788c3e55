// One direction of a link between two devices: latency, rate, and frames that are lost, doubled,
// held back or changed. Mirrors nearstep_sim.models.link.faults.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace nearstep::link {

struct Phit {
    std::uint64_t data[2] = {0, 0};
    bool head = false;
    bool last = false;
};

enum class FaultKind : std::int32_t { drop = 0, duplicate, reorder, corrupt, dead, stall };
constexpr int kFaultKinds = 6, kFrameKinds = 4;

// Kinds of frames, as in the header; `any` of them for a fault.
enum class FrameKind : std::int32_t { any = 0, control, entry, abort };

// Rates are chances of 65536 that the fault happens to a frame.
struct Options {
    std::uint32_t latency = 1, interval = 1;
    std::uint32_t drop = 0, duplicate = 0, reorder = 0, corrupt = 0;
    std::uint64_t seed = 1;
};

// The `nth` frame from now (0: the next) of kind `frame`, and those behind it, `times` in all.
// `dead` and `stall` with nth 0 and any frame begin at once; `cycles` is how long a stall takes.
struct FrameFault {
    FaultKind kind = FaultKind::drop;
    FrameKind frame = FrameKind::any;
    std::uint64_t nth = 0, times = 1, cycles = 0;
};

// Counts of phits, frames and, by kind, of injected faults; those also by the frames that they hit.
struct Statistics {
    std::uint64_t phits = 0, frames = 0, delivered_phits = 0;
    std::uint64_t faults[kFaultKinds] = {};
    std::uint64_t swallowed = 0;  // phits of a dead link
    std::uint64_t frame_faults[kFaultKinds][kFrameKinds] = {};
};

// Registered: what `tick` takes in one cycle can arrive in the next cycle at the earliest. In each
// cycle, ask `ready` and `arriving` first, then `tick` once.
class Link {
  public:
    explicit Link(const Options& options = {}) : Link(options, 0) {}

    // Resets to empty, without faults, all counts 0.
    void reset(const Options& options) { *this = Link(options, 0); }

    // Whether the sender's phit is taken in this cycle.
    bool ready() const { return wait_ == 0 && late() < kMostLate; }

    // The phit that arrives in this cycle, or null.
    const Phit* arriving() const { return arriving_ ? &arrival_ : nullptr; }

    void tick(bool valid, const Phit& phit) {
        const bool take = valid && ready();
        if (wait_) --wait_;
        if (take) {
            wait_ = options_.interval - 1;
            accept(phit);
        }
        if (held_ && now_ >= held_until_) release();
        ++now_;
        deliver();
    }

    void add(const FrameFault& fault) {
        const bool lasting = fault.kind == FaultKind::dead || fault.kind == FaultKind::stall;
        if (lasting && fault.nth == 0 && fault.frame == FrameKind::any)
            lasts(fault, FrameKind::any);
        else
            armed_.push_back({fault, 0});
    }

    // Removes faults that were not yet injected; a dead link remains dead.
    void clear_faults() { armed_.clear(); }

    void set_rates(std::uint32_t drop, std::uint32_t duplicate, std::uint32_t reorder,
                   std::uint32_t corrupt) {
        options_.drop = drop;
        options_.duplicate = duplicate;
        options_.reorder = reorder;
        options_.corrupt = corrupt;
    }

    bool dead() const { return dead_; }
    const Statistics& statistics() const { return statistics_; }

    // Whether no phit is in the link.
    bool empty() const { return queue_.empty() && !held_ && !arriving_; }

  private:
    static constexpr std::uint64_t kMostLate = 64;    // most cycles late, else the sender waits
    static constexpr std::uint64_t kMostHeld = 4096;  // most cycles that a frame is held back
    static constexpr int kHeadBit = 128, kLastBit = 129;

    struct Queued {
        Phit phit;
        std::uint64_t due;
    };
    struct Armed {
        FrameFault fault;
        std::uint64_t seen;
    };

    Link(const Options& options, int) : options_(options), state_(options.seed) {
        if (options_.latency == 0) options_.latency = 1;
        if (options_.interval == 0) options_.interval = 1;
    }

    std::uint64_t late() const {
        if (queue_.empty() || queue_.front().due >= now_) return 0;
        return now_ - queue_.front().due;
    }

    std::uint64_t random() {  // splitmix64
        std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    bool chance(std::uint32_t of_65536) {
        return of_65536 != 0 && (random() & 0xFFFF) < of_65536;
    }

    void made(FaultKind kind, FrameKind frame) {
        ++statistics_.faults[int(kind)];
        ++statistics_.frame_faults[int(kind)][int(frame) % kFrameKinds];
    }

    void lasts(const FrameFault& fault, FrameKind frame) {
        made(fault.kind, frame);
        if (fault.kind == FaultKind::dead) {
            dead_ = true;
            queue_.clear();
            held_frames_.clear();
            held_ = 0;
            arriving_ = false;
        } else {
            stalled_until_ = now_ + fault.cycles;
        }
    }

    bool armed(FaultKind kind, FrameKind frame) {
        bool hit = false;
        for (auto& [fault, seen] : armed_) {
            if (fault.kind != kind) continue;
            if (fault.frame != FrameKind::any && fault.frame != frame) continue;
            const std::uint64_t index = seen++;
            if (index < fault.nth || index - fault.nth >= fault.times) continue;
            if (kind == FaultKind::dead || kind == FaultKind::stall) lasts(fault, frame);
            hit = true;
        }
        return hit;
    }

    bool happens(FaultKind kind, FrameKind frame, std::uint32_t rate) {
        const bool told = armed(kind, frame);
        const bool hit = chance(rate) || told;
        if (hit) made(kind, frame);
        return hit;
    }

    void begin(const Phit& phit) {
        ++statistics_.frames;
        const FrameKind kind = FrameKind(phit.data[0] & 7);
        const std::uint64_t phits =
            kind == FrameKind::entry ? ((phit.data[0] >> 15) & 0xFF) + 3 : 1;
        armed(FaultKind::dead, kind);
        armed(FaultKind::stall, kind);
        dropping_ = happens(FaultKind::drop, kind, options_.drop);
        duplicating_ = happens(FaultKind::duplicate, kind, options_.duplicate);
        holding_ = happens(FaultKind::reorder, kind, options_.reorder);
        flips_.clear();
        if (happens(FaultKind::corrupt, kind, options_.corrupt)) {
            const std::uint64_t at = random() % phits;
            for (std::uint64_t count = 1 + random() % 3; count; --count) {
                // One in 64 hits the sideband of the phit.
                const int bit = random() % 64 ? int(random() % 128) : kHeadBit + int(random() % 2);
                flips_.push_back({at, bit});
            }
        }
        index_ = 0;
        frame_.clear();
    }

    static void flip(Phit& phit, int bit) {
        if (bit == kHeadBit)
            phit.head = !phit.head;
        else if (bit == kLastBit)
            phit.last = !phit.last;
        else
            phit.data[bit / 64] ^= 1ull << (bit % 64);
    }

    void accept(const Phit& phit) {
        ++statistics_.phits;
        if (phit.head) begin(phit);
        inside_ = !phit.last;
        if (dead_) {
            ++statistics_.swallowed;
            return;
        }
        Phit sent = phit;
        for (const auto& [at, bit] : flips_)
            if (at == index_) flip(sent, bit);
        ++index_;
        if (dropping_) return;
        if (holding_ || duplicating_) frame_.push_back(sent);
        if (!holding_) push(sent);
        if (phit.last) end();
    }

    void end() {
        if (holding_) {
            for (int copies = duplicating_ ? 2 : 1; copies; --copies)
                held_frames_.insert(held_frames_.end(), frame_.begin(), frame_.end());
            if (!held_) {
                held_ = 1 + int(random() % 2);
                held_until_ = now_ + kMostHeld;
            }
        } else {
            if (duplicating_)
                for (const Phit& each : frame_) push(each);
            if (held_ && --held_ == 0) release();
        }
        frame_.clear();
        holding_ = duplicating_ = false;
    }

    // Releases held frames, between two other frames.
    void release() {
        if (inside_) return;
        for (const Phit& each : held_frames_) push(each);
        held_frames_.clear();
        held_ = 0;
    }

    void push(const Phit& phit) { queue_.push_back({phit, now_ + options_.latency}); }

    void deliver() {
        arriving_ = false;
        if (gap_) --gap_;
        if (gap_ || now_ < stalled_until_ || queue_.empty() || queue_.front().due > now_) return;
        arrival_ = queue_.front().phit;
        queue_.pop_front();
        arriving_ = true;
        gap_ = options_.interval;
        ++statistics_.delivered_phits;
    }

    Options options_;
    std::uint64_t state_ = 1;
    std::uint64_t now_ = 0, wait_ = 0, gap_ = 0, stalled_until_ = 0, held_until_ = 0;
    std::uint64_t index_ = 0;  // of the next phit of the frame
    int held_ = 0;             // frames until the held ones are released
    bool dead_ = false, dropping_ = false, duplicating_ = false, holding_ = false;
    bool inside_ = false;  // of a frame that is being sent
    bool arriving_ = false;
    Phit arrival_;
    std::deque<Queued> queue_;
    std::vector<Phit> frame_, held_frames_;
    std::vector<std::pair<std::uint64_t, int>> flips_;
    std::vector<Armed> armed_;
    Statistics statistics_;
};

}  // namespace nearstep::link
